/* Values into and out of sockets, hashed slice by slice while they are in the cache. Sockets are blocking; whoever
 * keeps their deadlines shuts them down, which ends a call here with "closed". */
#include "core.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#define MAX_PARTS 512
#define MAX_RECEIVE ((size_t)512 << 10) /* with one call: what has come is hashed while it is in the cache */
#define LAST_BYTES ((size_t)64 << 10)   /* of a value: sent with its checksum, which is made when all before is on its way */

int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Until the socket is ready for `events`; 1, or 0 when the deadline has passed, or -1. */
static int wait_for(int fd, short events, int64_t deadline_ms) {
    for (;;) {
        int64_t left = deadline_ms - now_ms();
        if (left <= 0) return 0;
        struct pollfd one = {fd, events, 0};
        int ready = poll(&one, 1, left > 1000000 ? 1000000 : (int)left);
        if (ready > 0) return 1;
        if (ready < 0 && errno != EINTR) return -1;
    }
}

int receive_all(int fd, uint8_t *into, size_t count, int64_t deadline_ms) {
    while (count) {
        ssize_t got = recv(fd, into, count, deadline_ms < 0 ? 0 : MSG_DONTWAIT);
        if (got > 0) {
            into += got;
            count -= (size_t)got;
        } else if (got == 0) {
            return 0;
        } else if (deadline_ms >= 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            int ready = wait_for(fd, POLLIN, deadline_ms);
            if (ready <= 0) return ready;
        } else if (errno != EINTR) {
            return -1;
        }
    }
    return 1;
}

int send_parts(int fd, struct iovec *parts, size_t count, int64_t deadline_ms) {
    while (count && !parts->iov_len) parts++, count--;
    while (count) {
        struct msghdr message = {0};
        message.msg_iov = parts;
        message.msg_iovlen = count < MAX_PARTS ? count : MAX_PARTS;
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | (deadline_ms < 0 ? 0 : MSG_DONTWAIT));
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (deadline_ms < 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) return -1;
            int ready = wait_for(fd, POLLOUT, deadline_ms);
            if (ready <= 0) return ready;
            continue;
        }
        size_t left = (size_t)sent;
        while (count && left >= parts->iov_len) {
            left -= parts->iov_len;
            parts++, count--;
        }
        if (count) {
            parts->iov_base = (uint8_t *)parts->iov_base + left;
            parts->iov_len -= left;
        }
    }
    return 1;
}

/* Receive one value, and hash what has come as it comes. */
static int receive_hashed(int fd, uint8_t *into, size_t count, uint64_t seed, void *state, uint64_t *digest) {
    size_t done = 0;
    hashing.reset(state, seed);
    while (done < count) {
        size_t left = count - done;
        ssize_t got = recv(fd, into + done, left < MAX_RECEIVE ? left : MAX_RECEIVE, 0);
        if (got == 0) return 0;
        if (got < 0) {
            if (errno == EINTR) continue;
            return -1;
        }
        hashing.update(state, into + done, (size_t)got);
        done += (size_t)got;
    }
    *digest = hashing.digest(state);
    return 1;
}

static PyObject *answer(int done) {
    if (done < 0) return PyErr_SetFromErrno(PyExc_OSError);
    return PyBool_FromLong(done);
}

/* --- pieces: read_pieces(fd, views, seeds, have) -> digests | None. A seed of None: not hashed. `have` bytes of the first
 * are there already. None: closed. */

typedef struct {
    Py_buffer buffer;
    size_t have;
    uint64_t seed, digest;
    int hashed;
} Piece;

static void drop_pieces(Piece *pieces, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) PyBuffer_Release(&pieces[i].buffer);
    PyMem_Free(pieces);
}

static Piece *take_pieces(PyObject *views, PyObject *seeds, int flags, Py_ssize_t *count) {
    if (!PyList_Check(views) || !PyList_Check(seeds) || PyList_GET_SIZE(views) != PyList_GET_SIZE(seeds)) {
        PyErr_SetString(PyExc_TypeError, "views and seeds are lists of one length");
        return NULL;
    }
    Py_ssize_t total = PyList_GET_SIZE(views);
    Piece *pieces = PyMem_Calloc((size_t)total + 1, sizeof(Piece));
    if (pieces == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (*count = 0; *count < total; ++*count) {
        Piece *piece = &pieces[*count];
        PyObject *seed = PyList_GET_ITEM(seeds, *count);
        piece->hashed = seed != Py_None;
        piece->seed = piece->hashed ? PyLong_AsUnsignedLongLongMask(seed) : 0;
        if (PyErr_Occurred() || PyObject_GetBuffer(PyList_GET_ITEM(views, *count), &piece->buffer, flags) < 0) {
            drop_pieces(pieces, *count);
            return NULL;
        }
    }
    return pieces;
}

static PyObject *digests_of(const Piece *pieces, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *digest = PyLong_FromUnsignedLongLong(pieces[i].digest);
        if (digest == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, digest);
    }
    return list;
}

/* `count` more bytes of a piece have come. */
static void take(Piece *piece, size_t count, void *state) {
    uint8_t *from = (uint8_t *)piece->buffer.buf + piece->have;
    size_t size = (size_t)piece->buffer.len;
    if (piece->hashed && count == size) {
        piece->digest = hashing.whole(from, size, piece->seed);
    } else if (piece->hashed) {
        if (piece->have == 0) hashing.reset(state, piece->seed);
        hashing.update(state, from, count);
        if (piece->have + count == size) piece->digest = hashing.digest(state);
    }
    piece->have += count;
}

/* One piece at most is there in part, so one state will do. */
static int receive_pieces(int fd, Piece *pieces, Py_ssize_t count, void *state) {
    struct iovec parts[MAX_PARTS];
    if (pieces[0].hashed && pieces[0].have) {
        hashing.reset(state, pieces[0].seed);
        hashing.update(state, pieces[0].buffer.buf, pieces[0].have);
    }
    for (Py_ssize_t at = 0; at < count;) {
        size_t num_parts = 0, room = MAX_RECEIVE;
        for (Py_ssize_t i = at; i < count && num_parts < MAX_PARTS && room; i++) {
            size_t left = (size_t)pieces[i].buffer.len - pieces[i].have;
            if (left > room) left = room;
            parts[num_parts++] = (struct iovec){(uint8_t *)pieces[i].buffer.buf + pieces[i].have, left};
            room -= left;
        }
        struct msghdr message = {0};
        message.msg_iov = parts;
        message.msg_iovlen = num_parts;
        ssize_t got = recvmsg(fd, &message, 0);
        if (got == 0) return 0;
        if (got < 0) {
            if (errno == EINTR) continue;
            return -1;
        }
        for (size_t fresh = (size_t)got; fresh;) {
            size_t left = (size_t)pieces[at].buffer.len - pieces[at].have;
            if (left > fresh) left = fresh;
            take(&pieces[at], left, state);
            fresh -= left;
            if (pieces[at].have == (size_t)pieces[at].buffer.len) at++;
        }
    }
    return 1;
}

static PyObject *read_pieces(PyObject *module, PyObject *args) {
    int fd;
    PyObject *views, *seeds;
    Py_ssize_t have, count;
    if (!PyArg_ParseTuple(args, "iOOn", &fd, &views, &seeds, &have)) return NULL;
    Piece *pieces = take_pieces(views, seeds, PyBUF_WRITABLE, &count);
    if (pieces == NULL) return NULL;
    int wrong = count == 0 || have < 0 || have >= pieces[0].buffer.len;
    for (Py_ssize_t i = 0; i < count; i++) wrong = wrong || pieces[i].buffer.len == 0;
    if (wrong) {
        drop_pieces(pieces, count);
        PyErr_SetString(PyExc_ValueError, "an empty view, or more is there than the first view has");
        return NULL;
    }
    pieces[0].have = (size_t)have;
    void *state = hashing.create();
    int done = -1;
    errno = ENOMEM;
    Py_BEGIN_ALLOW_THREADS
    if (state != NULL) done = receive_pieces(fd, pieces, count, state);
    Py_END_ALLOW_THREADS
    if (state != NULL) {
        int kept = errno;
        hashing.destroy(state);
        errno = kept;
    }
    PyObject *result = done < 0 ? PyErr_SetFromErrno(PyExc_OSError) : NULL;
    if (done == 1) result = digests_of(pieces, count);
    if (done == 0) result = Py_NewRef(Py_None);
    drop_pieces(pieces, count);
    return result;
}

/* A head and chunks, each hashed when it is on its way; the end of the last one goes with all checksums. */
static int send_pieces(int fd, const Py_buffer *head, Piece *pieces, Py_ssize_t count, uint64_t *sums) {
    for (Py_ssize_t i = 0; i < count; i++) {
        uint8_t *from = pieces[i].buffer.buf;
        size_t size = (size_t)pieces[i].buffer.len;
        size_t last = i + 1 < count ? 0 : size < LAST_BYTES ? size : LAST_BYTES;
        struct iovec parts[2] = {{head->buf, i ? 0 : (size_t)head->len}, {from, size - last}};
        int done = send_parts(fd, parts, 2, -1);
        if (done != 1) return done;
        sums[i] = hashing.whole(from, size, pieces[i].seed);
        if (i + 1 == count) {
            struct iovec rest[2] = {{from + size - last, last}, {sums, 8 * (size_t)count}};
            return send_parts(fd, rest, 2, -1);
        }
    }
    return 1;
}

/* send_values(fd, head, views, seeds) -> bool: head, values, and then their checksums. False: closed. */
static PyObject *send_values(PyObject *module, PyObject *args) {
    int fd;
    Py_buffer head;
    PyObject *views, *seeds;
    if (!PyArg_ParseTuple(args, "iy*OO", &fd, &head, &views, &seeds)) return NULL;
    Py_ssize_t count;
    Piece *pieces = take_pieces(views, seeds, PyBUF_SIMPLE, &count);
    uint64_t *sums = pieces == NULL ? NULL : PyMem_Malloc(8 * ((size_t)count + 1));
    if (sums == NULL) {
        if (pieces != NULL) drop_pieces(pieces, count);
        PyBuffer_Release(&head);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    int done, kept;
    Py_BEGIN_ALLOW_THREADS
    done = send_pieces(fd, &head, pieces, count, sums);
    kept = errno;
    Py_END_ALLOW_THREADS
    drop_pieces(pieces, count);
    PyMem_Free(sums);
    PyBuffer_Release(&head);
    errno = kept;
    return answer(done);
}

/* --- get_one(fd, request, request_id, value, seed, verify) -> (item, read)
 * item: of the object, TORN when its bytes are not its own; None when the answer is not that of a get of one, and
 * `read` has then what came so far of it; False: closed. */

static int is_got_one(const uint8_t *head, uint64_t request_id, uint64_t bytes) {
    return memcmp(head, "GCS1", 4) == 0 && head[4] == OP_GET && head[5] == 0 && load16(head + 6) == 1 &&
           load64(head + 8) == request_id && load32(head + 28) == GOT_BYTES + 8 && load64(head + 32) == bytes;
}

static PyObject *get_one(PyObject *module, PyObject *args) {
    int fd, verify;
    unsigned long long request_id, seed;
    Py_buffer request, value;
    if (!PyArg_ParseTuple(args, "iy*Kw*Kp", &fd, &request, &request_id, &value, &seed, &verify)) return NULL;
    uint8_t head[HEAD_BYTES + GOT_BYTES + 8];
    size_t have = 0;
    int done, kept = 0, ours = 0;
    uint64_t digest = 0;
    void *state = hashing.create();
    if (state == NULL) {
        PyBuffer_Release(&request);
        PyBuffer_Release(&value);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    struct iovec first = {request.buf, (size_t)request.len};
    done = send_parts(fd, &first, 1, -1);
    while (done == 1 && have < HEAD_BYTES) {
        ssize_t got = recv(fd, head + have, sizeof head - have, 0);
        if (got > 0) have += (size_t)got;
        else if (got == 0) done = 0;
        else if (errno != EINTR) done = -1;
    }
    if (done == 1 && is_got_one(head, request_id, (uint64_t)value.len)) {
        done = receive_all(fd, head + have, sizeof head - have, -1);
        have = sizeof head;
        const uint8_t *got = head + HEAD_BYTES;
        ours = got[0] == 0 && load32(got + 4) == 0 && load64(got + 8) == (uint64_t)value.len && load32(got + 24) == 1;
        if (done == 1 && ours)
            done = verify ? receive_hashed(fd, value.buf, (size_t)value.len, seed, state, &digest)
                          : receive_all(fd, value.buf, (size_t)value.len, -1);
    }
    kept = errno;
    Py_END_ALLOW_THREADS
    hashing.destroy(state);
    int torn = verify && digest != load64(head + HEAD_BYTES + GOT_BYTES);
    PyBuffer_Release(&request);
    PyBuffer_Release(&value);
    errno = kept;
    if (done < 0) return PyErr_SetFromErrno(PyExc_OSError);
    if (done == 0) return Py_BuildValue("(Oy)", Py_False, "");
    if (!ours) return Py_BuildValue("(Oy#)", Py_None, head, (Py_ssize_t)have);
    return Py_BuildValue("(iy)", torn ? 2 : 0, "");
}

/* put_one(fd, head, value, seed, request_id) -> (item, read): a value of one chunk and, unless the head has it, its checksum
 * behind it (seed None: the head has it). The item and `read` are as for get_one. */
static PyObject *put_one(PyObject *module, PyObject *args) {
    int fd;
    Py_buffer head;
    PyObject *value, *seed;
    unsigned long long request_id;
    if (!PyArg_ParseTuple(args, "iy*OOK", &fd, &head, &value, &seed, &request_id)) return NULL;
    Piece piece = {0};
    piece.hashed = seed != Py_None;
    piece.seed = piece.hashed ? PyLong_AsUnsignedLongLongMask(seed) : 0;
    if (PyErr_Occurred() || PyObject_GetBuffer(value, &piece.buffer, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&head);
        return NULL;
    }
    uint8_t answered[HEAD_BYTES + 1];
    size_t have = 0;
    int done, kept;
    Py_BEGIN_ALLOW_THREADS
    uint64_t sum;
    struct iovec parts[2] = {{head.buf, (size_t)head.len}, {piece.buffer.buf, (size_t)piece.buffer.len}};
    done = piece.hashed ? send_pieces(fd, &head, &piece, 1, &sum) : send_parts(fd, parts, 2, -1);
    while (done == 1 && (have < HEAD_BYTES || (have == HEAD_BYTES && load32(answered + 28) > 0))) {
        ssize_t got = recv(fd, answered + have, sizeof answered - have, 0);
        if (got > 0) have += (size_t)got;
        else if (got == 0) done = 0;
        else if (errno != EINTR) done = -1;
    }
    kept = errno;
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&head);
    PyBuffer_Release(&piece.buffer);
    errno = kept;
    if (done < 0) return PyErr_SetFromErrno(PyExc_OSError);
    if (done == 0) return Py_BuildValue("(Oy)", Py_False, "");
    int ours = memcmp(answered, "GCS1", 4) == 0 && answered[4] == OP_PUT && answered[5] == 0 &&
               load16(answered + 6) == 1 && load64(answered + 8) == request_id && load32(answered + 28) == 1 &&
               load64(answered + 32) == 0;
    if (!ours) return Py_BuildValue("(Oy#)", Py_None, answered, (Py_ssize_t)have);
    return Py_BuildValue("(iy)", (int)answered[HEAD_BYTES], "");
}

PyMethodDef io_methods[] = {
    {"put_one", put_one, METH_VARARGS, "Store one object of one chunk, and take in the answer."},
    {"read_pieces", read_pieces, METH_VARARGS, "Fill buffers from a socket, and hash them."},
    {"send_values", send_values, METH_VARARGS, "Send a head, values, and their checksums."},
    {"get_one", get_one, METH_VARARGS, "Ask for one object of one chunk, and take it in."},
    {NULL, NULL, 0, NULL},
};
