/* A server's answers to GET, without the interpreter: objects that the shared index finds go from the arena to the socket. */
#include "table.h"

#include <errno.h>
#include <sys/socket.h>

#define READ_AHEAD 4096u /* most that is read behind a head: what of it belongs to a value must be copied */

typedef struct {
    const Table *table;
    Block *block;
    int fd;
    int64_t timeout_ms;
    uint8_t *metas;       /* of the answer, its head first */
    struct iovec *parts;  /* the metas, then values */
    size_t room;          /* bytes of `metas` */
} Answerer;

/* Head, metas and values of the answer to a whole GET frame; 1, or 0: it is for others to answer. */
static int gather(Answerer *a, const uint8_t *frame, size_t count, size_t meta_bytes, size_t *num_parts, size_t *held,
                  size_t *answer_bytes, uint64_t *body) {
    const Table *table = a->table;
    size_t at = HEAD_BYTES, end = HEAD_BYTES + meta_bytes, written = HEAD_BYTES;
    *num_parts = 1;
    *held = 0;
    *body = 0;
    for (size_t i = 0; i < count; i++) {
        if (at + WANT_BYTES > end) return 0;
        uint64_t wanted = load64(frame + at);
        uint64_t first = load32(frame + at + 8), chunks = load32(frame + at + 12);
        size_t key_bytes = load16(frame + at + 16);
        const uint8_t *key = frame + at + WANT_BYTES;
        at += WANT_BYTES + key_bytes;
        if (at > end || key_bytes == 0 || key_bytes > MAX_KEY_BYTES) return 0;
        Found found;
        if (!find(table, key, key_bytes, hashing.whole(key, key_bytes, 0), &found)) return 0;
        if (wanted != ANY_BYTES && wanted != found.value_bytes) return 0;
        uint64_t all = num_chunks(found.value_bytes);
        if (first > all || !hold(table, a->block, i, &found, SENDING)) return 0;
        *held = i + 1;
        if (chunks == 0 || chunks > all - first) chunks = all - first;
        uint64_t begin = first * CHUNK_BYTES, size = found.value_bytes - begin;
        if (first == all) begin = size = 0;
        if (size > chunks * CHUNK_BYTES) size = chunks * CHUNK_BYTES;
        if (*body + size > MAX_FRAME_BYTES) return 0;
        size_t needed = GOT_BYTES + 8 * (size_t)chunks;
        if (written + needed > a->room) {
            size_t room = 2 * (written + needed);
            uint8_t *more = realloc(a->metas, room);
            if (more == NULL) return 0;
            a->metas = more;
            a->room = room;
        }
        uint8_t *got = a->metas + written;
        memset(got, 0, 4); /* Item.OK */
        store32(got + 4, (uint32_t)first);
        store64(got + 8, found.value_bytes);
        store64(got + 16, found.version);
        store32(got + 24, (uint32_t)chunks);
        memcpy(got + GOT_BYTES, record_of(table, &found) + found.sums_at + 8 * first, 8 * (size_t)chunks);
        written += needed;
        if (size) a->parts[(*num_parts)++] = (struct iovec){record_of(table, &found) + found.value_at + begin, size};
        *body += size;
    }
    *answer_bytes = written;
    return at == end;
}

enum { ENDED = -1, FOR_OTHERS = 0, ANSWERED = 1 };

/* ENDED: the peer has gone, or did not take the answer in time. */
static int answer_get(Answerer *a, const uint8_t *frame, size_t count, size_t meta_bytes) {
    size_t num_parts, held, bytes = 0;
    uint64_t body;
    int done = gather(a, frame, count, meta_bytes, &num_parts, &held, &bytes, &body);
    if (done == 1) {
        uint8_t *head = a->metas;
        memcpy(head, "GCS1", 4);
        head[4] = OP_GET;
        head[5] = 0;
        store16(head + 6, (uint16_t)count);
        memcpy(head + 8, frame + 8, 16); /* the request's id; its epoch, which is the server's */
        if (__atomic_load_n(&a->table->head->answered, __ATOMIC_RELAXED) == ANSWERS_ALL) store64(head + 16, 0);
        store32(head + 24, 0);
        store32(head + 28, (uint32_t)(bytes - HEAD_BYTES));
        store64(head + 32, body);
        a->parts[0] = (struct iovec){a->metas, bytes};
        done = send_parts(a->fd, a->parts, num_parts, now_ms() + a->timeout_ms) == 1 ? ANSWERED : ENDED;
    } else {
        done = FOR_OTHERS;
    }
    let_go(a->block, held);
    if (done == ANSWERED) {
        __atomic_store_n(&a->block->gets, a->block->gets + count, __ATOMIC_RELAXED);
        __atomic_store_n(&a->block->got_bytes, a->block->got_bytes + body, __ATOMIC_RELAXED);
    }
    return done;
}

/* Frames from buffer[*begin:*end] on, and what comes behind them, until one is for others. */
static int answer_all(Answerer *a, uint8_t *buffer, size_t size, size_t *begin, size_t *end) {
    for (;;) {
        size_t have = *end - *begin;
        if (*begin && have < HEAD_BYTES) {
            memmove(buffer, buffer + *begin, have);
            *begin = 0;
            *end = have;
        }
        if (have < HEAD_BYTES) {
            if (have) { /* only who has begun nothing may be idle */
                if (receive_all(a->fd, buffer + have, HEAD_BYTES - have, now_ms() + a->timeout_ms) != 1) return ENDED;
                *end = HEAD_BYTES;
                continue;
            }
            ssize_t got = recv(a->fd, buffer, READ_AHEAD, 0);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) return ENDED;
            *end += (size_t)got;
            continue;
        }
        const uint8_t *frame = buffer + *begin;
        size_t count = load16(frame + 6), meta_bytes = load32(frame + 28);
        if (memcmp(frame, "GCQ1", 4) != 0 || frame[4] != OP_GET || frame[5] != 0 || load64(frame + 32) != 0) return 0;
        if (count == 0 || count > HOLDS || meta_bytes > size - HEAD_BYTES) return FOR_OTHERS;
        if (!answers(a->table, load64(frame + 16))) return FOR_OTHERS;
        if (have < HEAD_BYTES + meta_bytes) {
            if (*begin + HEAD_BYTES + meta_bytes > size) {
                memmove(buffer, buffer + *begin, have);
                *begin = 0;
                *end = have;
            }
            size_t missing = HEAD_BYTES + meta_bytes - have;
            if (receive_all(a->fd, buffer + *end, missing, now_ms() + a->timeout_ms) != 1) return ENDED;
            *end += missing;
            frame = buffer + *begin;
        }
        if (!answers(a->table, load64(frame + 16))) return FOR_OTHERS; /* the frame may have been long in coming */
        int done = answer_get(a, frame, count, meta_bytes);
        if (done != ANSWERED) return done;
        *begin += HEAD_BYTES + meta_bytes;
    }
}

/* serve(fd, block, buffer, begin, end, timeout_ms) -> (begin, end) of what comes next, whole or in part, or None: it
 * ended. */
PyObject *table_serve(PyObject *self, PyObject *args) {
    Table *table = (Table *)self;
    int fd;
    unsigned long long number;
    long long timeout_ms;
    Py_buffer buffer;
    Py_ssize_t begin, end;
    if (!PyArg_ParseTuple(args, "iKw*nnL", &fd, &number, &buffer, &begin, &end, &timeout_ms)) return NULL;
    struct iovec *parts = PyMem_RawMalloc((HOLDS + 1) * sizeof *parts);
    uint8_t *metas = malloc(4096);
    int fits = 0 <= begin && begin <= end && end <= buffer.len && buffer.len >= (Py_ssize_t)READ_AHEAD;
    if (parts == NULL || metas == NULL || !fits || number >= table->num_blocks) {
        PyMem_RawFree(parts);
        free(metas);
        PyBuffer_Release(&buffer);
        if (fits && number < table->num_blocks) return PyErr_NoMemory();
        PyErr_SetString(PyExc_ValueError, "no such block, or a buffer that is too short");
        return NULL;
    }
    Answerer a = {table, &table->blocks[number], fd, timeout_ms, metas, parts, 4096};
    size_t from = (size_t)begin, to = (size_t)end;
    int done;
    if (table->serving) table->serving[number] = 1;
    Py_BEGIN_ALLOW_THREADS
    done = answer_all(&a, buffer.buf, (size_t)buffer.len, &from, &to);
    Py_END_ALLOW_THREADS
    if (table->serving) table->serving[number] = 0;
    PyMem_RawFree(parts);
    free(a.metas);
    PyBuffer_Release(&buffer);
    if (done == ENDED) Py_RETURN_NONE;
    return Py_BuildValue("(nn)", (Py_ssize_t)from, (Py_ssize_t)to);
}
