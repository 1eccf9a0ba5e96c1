/* Many small objects per frame: packed, scattered and checked without a step of the interpreter for each. */
#include "core.h"

#include <errno.h>
#include <sys/socket.h>

#define MAX_KEYS 512
#define PUT_BYTES 34u
#define TORN 2

typedef struct {
    Py_ssize_t count;
    const uint8_t *keys[MAX_KEYS];
    size_t key_bytes[MAX_KEYS];
    Py_buffer values[MAX_KEYS];
} Objects;

static void drop(Objects *objects) {
    for (Py_ssize_t i = 0; i < objects->count; i++) PyBuffer_Release(&objects->values[i]);
    PyMem_Free(objects);
}

/* Keys and memory of a frame's objects; borrowed from the lists, which their caller keeps. */
static Objects *objects_of(PyObject *keys, PyObject *values, int flags) {
    Py_ssize_t count = PyList_GET_SIZE(keys);
    if (count != PyList_GET_SIZE(values) || count == 0 || count > MAX_KEYS) {
        PyErr_SetString(PyExc_ValueError, "keys and values differ in number, or are none or too many");
        return NULL;
    }
    Objects *objects = PyMem_Malloc(sizeof *objects);
    if (objects == NULL) return (Objects *)PyErr_NoMemory();
    for (objects->count = 0; objects->count < count; objects->count++) {
        Py_ssize_t i = objects->count;
        PyObject *key = PyList_GET_ITEM(keys, i);
        if (!PyBytes_Check(key)) PyErr_SetString(PyExc_TypeError, "a key is bytes");
        if (PyErr_Occurred() || PyObject_GetBuffer(PyList_GET_ITEM(values, i), &objects->values[i], flags) < 0) break;
        objects->keys[i] = (const uint8_t *)PyBytes_AS_STRING(key);
        objects->key_bytes[i] = (size_t)PyBytes_GET_SIZE(key);
    }
    if (objects->count == count) return objects;
    drop(objects);
    return NULL;
}

static void pack_head(uint8_t *at, int op, int flags, Py_ssize_t count, const unsigned long long *id_epoch_budget,
                      size_t meta_bytes, uint64_t body_bytes) {
    memcpy(at, "GCQ1", 4);
    at[4] = (uint8_t)op;
    at[5] = (uint8_t)flags;
    store16(at + 6, (uint16_t)count);
    store64(at + 8, id_epoch_budget[0]);
    store64(at + 16, id_epoch_budget[1]);
    store32(at + 24, (uint32_t)id_epoch_budget[2]);
    store32(at + 28, (uint32_t)meta_bytes);
    store64(at + 32, body_bytes);
}

static uint64_t sum_of(const Objects *o, Py_ssize_t i) {
    uint64_t seed = hashing.whole(o->keys[i], o->key_bytes[i], 0);
    return hashing.whole(o->values[i].buf, (size_t)o->values[i].len, seed);
}

static PyObject *ended(int done) {
    if (done < 0) return PyErr_SetFromErrno(PyExc_OSError);
    return PyBool_FromLong(done);
}

/* send_gets(fd, request_id, epoch, budget_ms, keys, views) -> bool: ask for whole objects of these sizes. False: closed. */
static PyObject *send_gets(PyObject *module, PyObject *args) {
    int fd;
    unsigned long long numbers[3];
    PyObject *keys, *values;
    if (!PyArg_ParseTuple(args, "iKKKO!O!", &fd, &numbers[0], &numbers[1], &numbers[2], &PyList_Type, &keys,
                          &PyList_Type, &values))
        return NULL;
    Objects *o = objects_of(keys, values, PyBUF_SIMPLE);
    if (o == NULL) return NULL;
    size_t size = HEAD_BYTES;
    for (Py_ssize_t i = 0; i < o->count; i++) size += WANT_BYTES + o->key_bytes[i];
    uint8_t *frame = PyMem_Malloc(size);
    if (frame == NULL) {
        drop(o);
        return PyErr_NoMemory();
    }
    pack_head(frame, OP_GET, 0, o->count, numbers, size - HEAD_BYTES, 0);
    uint8_t *at = frame + HEAD_BYTES;
    for (Py_ssize_t i = 0; i < o->count; i++) {
        store64(at, (uint64_t)o->values[i].len);
        store32(at + 8, 0);
        store32(at + 12, (uint32_t)num_chunks((uint64_t)o->values[i].len));
        store16(at + 16, (uint16_t)o->key_bytes[i]);
        memcpy(at + WANT_BYTES, o->keys[i], o->key_bytes[i]);
        at += WANT_BYTES + o->key_bytes[i];
    }
    drop(o);
    int done, kept;
    Py_BEGIN_ALLOW_THREADS
    struct iovec one = {frame, size};
    done = send_parts(fd, &one, 1, -1);
    kept = errno;
    Py_END_ALLOW_THREADS
    PyMem_Free(frame);
    errno = kept;
    return ended(done);
}

/* --- take_gots: the answer to send_gets */

typedef struct {
    uint8_t *data; /* head and metas, and what of the body came with them */
    size_t have, room;
    size_t surplus_at; /* from here on it is of the next answer */
    uint8_t status[MAX_KEYS];
    const uint8_t *sums[MAX_KEYS];
} Answer;

enum { CLOSED = 0, TAKEN = 1, OTHER = 2, NONSENSE = 3 };

static int receive_until(int fd, Answer *a, size_t needed) {
    while (a->have < needed) {
        ssize_t got = recv(fd, a->data + a->have, a->room - a->have, 0);
        if (got == 0) return CLOSED;
        if (got > 0) a->have += (size_t)got;
        else if (errno != EINTR) return -1;
    }
    return TAKEN;
}

static int scatter(int fd, Answer *a, Objects *o, size_t at) {
    struct iovec parts[MAX_KEYS];
    size_t count = 0, read_ahead = a->surplus_at - at;
    for (Py_ssize_t i = 0; i < o->count; i++) {
        if (a->status[i] != 0) continue;
        size_t size = (size_t)o->values[i].len, here = read_ahead < size ? read_ahead : size;
        memcpy(o->values[i].buf, a->data + at, here);
        at += here;
        read_ahead -= here;
        parts[count++] = (struct iovec){(uint8_t *)o->values[i].buf + here, size - here};
    }
    struct iovec *next = parts;
    for (;;) {
        while (count && next->iov_len == 0) next++, count--;
        if (!count) return TAKEN;
        struct msghdr message = {0};
        message.msg_iov = next;
        message.msg_iovlen = count;
        ssize_t got = recvmsg(fd, &message, 0);
        if (got == 0) return CLOSED;
        if (got < 0) {
            if (errno == EINTR) continue;
            return -1;
        }
        for (size_t left = (size_t)got; left;) {
            size_t part = left < next->iov_len ? left : next->iov_len;
            next->iov_base = (uint8_t *)next->iov_base + part;
            next->iov_len -= part;
            left -= part;
            if (next->iov_len == 0) next++, count--;
        }
    }
}

static int take(int fd, Answer *a, Objects *o, uint64_t request_id, int verify) {
    int done = receive_until(fd, a, HEAD_BYTES);
    if (done != TAKEN) return done;
    size_t meta_bytes = load32(a->data + 28), end = HEAD_BYTES + meta_bytes;
    if (memcmp(a->data, "GCS1", 4) != 0 || a->data[4] != OP_GET || a->data[5] != 0 ||
        load16(a->data + 6) != o->count || load64(a->data + 8) != request_id)
        return OTHER;
    if (end > a->room) return NONSENSE;
    done = receive_until(fd, a, end);
    if (done != TAKEN) return done;
    size_t at = HEAD_BYTES;
    uint64_t body = 0;
    for (Py_ssize_t i = 0; i < o->count; i++) {
        if (at + GOT_BYTES > end) return NONSENSE;
        const uint8_t *got = a->data + at;
        uint64_t size = (uint64_t)o->values[i].len, chunks = num_chunks(size);
        a->status[i] = got[0];
        a->sums[i] = got + GOT_BYTES;
        at += GOT_BYTES;
        if (got[0] != 0) continue;
        if (load64(got + 8) != size || load32(got + 4) != 0 || load32(got + 24) != chunks) return NONSENSE;
        at += 8 * chunks;
        body += size;
    }
    if (at != end || body != load64(a->data + 32)) return NONSENSE;
    a->surplus_at = a->have - at > body ? at + (size_t)body : a->have;
    done = scatter(fd, a, o, at);
    for (Py_ssize_t i = 0; verify && done == TAKEN && i < o->count; i++)
        if (a->status[i] == 0 && o->values[i].len && sum_of(o, i) != load64(a->sums[i])) a->status[i] = TORN;
    return done;
}

/* take_gots(fd, request_id, keys, views, verify, read) -> (items, read) | (None, read) | False | None: an item for each key, TORN
 * where the bytes are not its own, and what has come of the next answer; or what has come so far of another answer; or it
 * is closed; or it is nonsense. `read` has come already. Values have one chunk at most. */
static PyObject *take_gots(PyObject *module, PyObject *args) {
    int fd, verify;
    unsigned long long request_id;
    PyObject *keys, *values, *result = NULL;
    Py_buffer read;
    if (!PyArg_ParseTuple(args, "iKO!O!py*", &fd, &request_id, &PyList_Type, &keys, &PyList_Type, &values, &verify, &read))
        return NULL;
    Objects *o = objects_of(keys, values, PyBUF_WRITABLE);
    Answer *a = o == NULL ? NULL : PyMem_Calloc(1, sizeof *a);
    size_t room = o == NULL ? 0 : HEAD_BYTES + (size_t)o->count * (GOT_BYTES + 8);
    if (a != NULL) {
        a->room = room < (size_t)read.len ? (size_t)read.len : room;
        a->have = (size_t)read.len;
        a->data = PyMem_Malloc(a->room);
    }
    if (a == NULL || a->data == NULL) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
    } else {
        memcpy(a->data, read.buf, (size_t)read.len);
        int done;
        Py_BEGIN_ALLOW_THREADS
        done = take(fd, a, o, request_id, verify);
        Py_END_ALLOW_THREADS
        if (done < 0) PyErr_SetFromErrno(PyExc_OSError);
        else if (done == CLOSED) result = Py_NewRef(Py_False);
        else if (done == NONSENSE) result = Py_NewRef(Py_None);
        else if (done == OTHER) result = Py_BuildValue("(Oy#)", Py_None, a->data, (Py_ssize_t)a->have);
        else
            result = Py_BuildValue("(y#y#)", a->status, o->count, a->data + a->surplus_at,
                                   (Py_ssize_t)(a->have - a->surplus_at));
    }
    if (a != NULL) PyMem_Free(a->data);
    PyMem_Free(a);
    if (o != NULL) drop(o);
    PyBuffer_Release(&read);
    return result;
}

/* send_puts(fd, request_id, epoch, budget_ms, ttl_ms, root, keys, views) -> bool. Values have one chunk at most. */
static PyObject *send_puts(PyObject *module, PyObject *args) {
    int fd;
    unsigned long long numbers[3], ttl_ms, root;
    PyObject *keys, *values;
    if (!PyArg_ParseTuple(args, "iKKKKKO!O!", &fd, &numbers[0], &numbers[1], &numbers[2], &ttl_ms, &root, &PyList_Type,
                          &keys, &PyList_Type, &values))
        return NULL;
    Objects *o = objects_of(keys, values, PyBUF_SIMPLE);
    if (o == NULL) return NULL;
    size_t size = HEAD_BYTES + (root ? 8 : 0);
    uint64_t body = 0;
    for (Py_ssize_t i = 0; i < o->count; i++) {
        size += PUT_BYTES + o->key_bytes[i] + 8 * num_chunks((uint64_t)o->values[i].len);
        body += (uint64_t)o->values[i].len;
    }
    uint8_t *frame = PyMem_Malloc(size);
    struct iovec *parts = PyMem_Malloc((MAX_KEYS + 1) * sizeof *parts);
    if (frame == NULL || parts == NULL) {
        PyMem_Free(frame);
        PyMem_Free(parts);
        drop(o);
        return PyErr_NoMemory();
    }
    int done, kept;
    Py_BEGIN_ALLOW_THREADS
    uint8_t *at = frame + HEAD_BYTES;
    pack_head(frame, OP_PUT, root ? 2 : 0, o->count, numbers, size - HEAD_BYTES, body);
    if (root) {
        store64(at, root);
        at += 8;
    }
    for (Py_ssize_t i = 0; i < o->count; i++) {
        uint64_t chunks = num_chunks((uint64_t)o->values[i].len);
        store64(at, (uint64_t)o->values[i].len);
        store64(at + 8, 0);
        store64(at + 16, ttl_ms);
        store32(at + 24, 0);
        store32(at + 28, (uint32_t)chunks);
        store16(at + 32, (uint16_t)o->key_bytes[i]);
        memcpy(at + PUT_BYTES, o->keys[i], o->key_bytes[i]);
        at += PUT_BYTES + o->key_bytes[i];
        if (chunks) store64(at, sum_of(o, i));
        at += 8 * chunks;
        parts[i + 1] = (struct iovec){o->values[i].buf, (size_t)o->values[i].len};
    }
    parts[0] = (struct iovec){frame, size};
    done = send_parts(fd, parts, (size_t)o->count + 1, -1);
    kept = errno;
    Py_END_ALLOW_THREADS
    PyMem_Free(frame);
    PyMem_Free(parts);
    drop(o);
    errno = kept;
    return ended(done);
}

/* unpack_small_puts(meta, body, count) -> [(key, begin, size, ttl_ms, sum, whole)] | None: whole objects of one chunk at most, with
 * their sums in meta; where in the body each lies, and whether it is what its sum says. None: not such a frame. */
static PyObject *unpack_small_puts(PyObject *module, PyObject *args) {
    Py_buffer meta, body;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*y*n", &meta, &body, &count)) return NULL;
    const uint8_t *from = meta.buf;
    size_t at = 0, end = (size_t)meta.len, begin = 0;
    PyObject *list = PyList_New(0);
    int fits = list != NULL;
    for (Py_ssize_t i = 0; fits && i < count; i++) {
        fits = at + PUT_BYTES <= end;
        if (!fits) break;
        uint64_t size = load64(from + at), ttl_ms = load64(from + at + 16), chunks = num_chunks(size);
        size_t key_bytes = load16(from + at + 32);
        const uint8_t *key = from + at + PUT_BYTES;
        fits = size <= CHUNK_BYTES && load64(from + at + 8) == 0 && load32(from + at + 24) == 0 &&
               load32(from + at + 28) == chunks && key_bytes > 0 && key_bytes <= MAX_KEY_BYTES;
        at += PUT_BYTES + key_bytes + 8 * chunks;
        fits = fits && at <= end && key_bytes > 1u + key[0] && size <= (size_t)body.len - begin;
        if (!fits) break;
        uint64_t sum = chunks ? load64(from + at - 8) : 0;
        const uint8_t *value = (const uint8_t *)body.buf + begin;
        int whole = !chunks || hashing.whole(value, size, hashing.whole(key, key_bytes, 0)) == sum;
        PyObject *one = Py_BuildValue("(y#nKKKO)", key, (Py_ssize_t)key_bytes, (Py_ssize_t)begin, size, ttl_ms, sum,
                                      whole ? Py_True : Py_False);
        begin += size;
        if (one == NULL || PyList_Append(list, one) < 0) Py_CLEAR(list);
        Py_XDECREF(one);
        if (list == NULL) break;
    }
    fits = fits && at == end && begin == (size_t)body.len;
    PyBuffer_Release(&meta);
    PyBuffer_Release(&body);
    if (list != NULL && !fits) {
        Py_DECREF(list);
        Py_RETURN_NONE;
    }
    return list;
}

PyMethodDef batch_methods[] = {
    {"send_gets", send_gets, METH_VARARGS, "Ask for many objects."},
    {"take_gots", take_gots, METH_VARARGS, "Take in the answer."},
    {"send_puts", send_puts, METH_VARARGS, "Store many objects."},
    {"unpack_small_puts", unpack_small_puts, METH_VARARGS, "What is to be stored, checked."},
    {NULL, NULL, 0, NULL},
};
