#include "table.h"

#include <errno.h>
#include <sys/socket.h>
#include <time.h>

#define RELAXED __ATOMIC_RELAXED

static uint64_t clock_ns(clockid_t which) {
    struct timespec t;
    clock_gettime(which, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- finding and holding: no interpreter needed */

static int read_slot(const Table *table, uint64_t slot, const uint8_t *key, size_t key_bytes, Found *found) {
    const uint64_t *words = words_of(table, slot);
    uint64_t stamp = __atomic_load_n(&words[0], __ATOMIC_ACQUIRE);
    if ((stamp & 3) != COMMITTED) return 0;
    uint64_t start = __atomic_load_n(&words[1], RELAXED), units = __atomic_load_n(&words[2], RELAXED);
    uint64_t value_bytes = __atomic_load_n(&words[4], RELAXED);
    if (__atomic_load_n(&words[3], RELAXED) != key_bytes) return 0;
    if (start >= table->num_granules || units > table->num_granules - start || value_bytes > units * GRANULE) return 0;
    uint64_t sums_at = round_up(RECORD_HEAD + key_bytes, 8);
    uint64_t value_at = round_up(sums_at + 8 * num_chunks(value_bytes), 64);
    if (value_at + value_bytes > units * GRANULE) return 0;
    const uint8_t *record = table->arena + table->data_at + start * GRANULE;
    if (memcmp(record + RECORD_HEAD, key, key_bytes) != 0) return 0;
    uint64_t expiry_ns = load64(record + 24);
    *found = (Found){slot, stamp, start, value_bytes, __atomic_load_n(&words[5], RELAXED), value_at, sums_at};
    return still(table, found) && (expiry_ns == 0 || expiry_ns > clock_ns(CLOCK_REALTIME));
}

int still(const Table *table, const Found *found) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(words_of(table, found->slot), RELAXED) == found->stamp;
}

int find(const Table *table, const uint8_t *key, size_t key_bytes, uint64_t hash, Found *found) {
    uint64_t tag = hash >> 32;
    for (uint64_t at = tag & table->mask, tries = 0; tries <= table->mask; at = (at + 1) & table->mask, tries++) {
        uint64_t bucket = __atomic_load_n(&table->buckets[at], __ATOMIC_ACQUIRE);
        if (bucket == 0) return 0;
        uint64_t slot = (bucket & UINT32_MAX) - 1;
        if (bucket >> 32 == tag && slot < table->num_slots && read_slot(table, slot, key, key_bytes, found)) {
            __atomic_store_n(&table->marks[slot], 1, RELAXED);
            return 1;
        }
    }
    return 0;
}

int hold(const Table *table, Block *block, uint64_t index, const Found *found, uint64_t until_ns) {
    Hold *one = &block->holds[index];
    __atomic_store_n(&one->until_ns, until_ns, RELAXED);
    __atomic_store_n(&one->slot, found->slot + 1, __ATOMIC_RELEASE);
    if (__atomic_load_n(&block->top, RELAXED) <= index) __atomic_store_n(&block->top, index + 1, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(words_of(table, found->slot), RELAXED) == found->stamp) return 1;
    __atomic_store_n(&one->slot, 0, __ATOMIC_RELEASE);
    return 0;
}

void let_go(Block *block, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) __atomic_store_n(&block->holds[i].slot, 0, __ATOMIC_RELEASE);
}

int answers(const Table *table, uint64_t epoch) {
    uint64_t answered = __atomic_load_n(&table->head->answered, __ATOMIC_ACQUIRE);
    return answered == ANSWERS_ALL || (answered == epoch && answered != NONE);
}

/* Slots that are held: calls `each` until it says 1. `sent`: those too that the server itself holds while it sends. */
static int each_held(const Table *table, uint64_t now, int sent, int (*each)(void *, uint64_t), void *context) {
    uint64_t blocks = __atomic_load_n(&table->head->top_block, __ATOMIC_ACQUIRE);
    uint64_t most = table->lease_ns < (uint64_t)1 << 62 ? table->lease_ns + ALIVE_NS : (uint64_t)1 << 62, latest = now + most;
    if (blocks > table->num_blocks) blocks = table->num_blocks;
    for (uint64_t i = 0; i < blocks; i++) {
        Block *block = &table->blocks[i];
        uint64_t top = __atomic_load_n(&block->top, __ATOMIC_ACQUIRE);
        if (top > HOLDS) top = HOLDS;
        for (uint64_t j = 0; j < top; j++) {
            uint64_t slot = __atomic_load_n(&block->holds[j].slot, __ATOMIC_ACQUIRE);
            if (slot == 0 || slot > table->num_slots) continue;
            uint64_t until_ns = __atomic_load_n(&block->holds[j].until_ns, RELAXED);
            if (until_ns <= now) continue;
            /* No client may hold anything for much longer than a lease: such an end is none. */
            if (until_ns > latest && !(sent && until_ns == SENDING && table->serving && table->serving[i])) continue;
            if (each(context, slot - 1)) return 1;
        }
    }
    return 0;
}

static int is_slot(void *context, uint64_t slot) { return slot == *(uint64_t *)context; }

static int add_slot(void *context, uint64_t slot) {
    PyObject *number = PyLong_FromUnsignedLongLong(slot);
    int failed = number == NULL || PyList_Append(context, number) < 0;
    Py_XDECREF(number);
    return failed;
}

typedef struct {
    const Table *table;
    uint64_t bytes;
} Sum;

static int add_bytes(void *context, uint64_t slot) {
    Sum *sum = context;
    uint64_t units = __atomic_load_n(&words_of(sum->table, slot)[2], RELAXED);
    if (units <= sum->table->num_granules) sum->bytes += units * GRANULE;
    return 0;
}

/* What clients keep in place now. A lease that is over counts no more, whether or not its view was released. */
static uint64_t bytes_held(const Table *table) {
    Sum sum = {table, 0};
    each_held(table, clock_ns(CLOCK_MONOTONIC), 0, add_bytes, &sum);
    return sum.bytes;
}

/* --- the type */

static int table_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    Table *table = (Table *)self;
    PyObject *arena, *index;
    int writable;
    if (!PyArg_ParseTuple(args, "OOp", &arena, &index, &writable)) return -1;
    if (table->arena_buffer.obj != NULL) {
        PyErr_SetString(PyExc_TypeError, "a table is made once");
        return -1;
    }
    if (PyObject_GetBuffer(arena, &table->arena_buffer, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) return -1;
    if (PyObject_GetBuffer(index, &table->index_buffer, PyBUF_WRITABLE) < 0) return -1;
    table->arena = table->arena_buffer.buf;
    uint64_t arena_bytes = (uint64_t)table->arena_buffer.len, index_bytes = (uint64_t)table->index_buffer.len;
    const char *wrong = "a shared index that does not fit its arena";
    if (arena_bytes < 4096 || index_bytes < 4096) goto refuse;
    /* ArenaHead: magic 8, version 4, granule 4, slots 8, first byte of records 8, granules 8 */
    table->num_slots = load64(table->arena + 16);
    table->data_at = load64(table->arena + 24);
    table->num_granules = load64(table->arena + 32);
    table->head = table->index_buffer.buf;
    uint64_t buckets = table->head->num_buckets;
    table->num_blocks = table->head->num_blocks;
    table->lease_ns = table->head->lease_ns;
    if (table->num_slots >= UINT32_MAX || table->head->num_slots != table->num_slots) goto refuse;
    if (table->data_at > arena_bytes || table->num_granules > (arena_bytes - table->data_at) / GRANULE) goto refuse;
    if (4096 + 64 * table->num_slots > table->data_at) goto refuse;
    if (buckets == 0 || buckets > index_bytes / 8 || (buckets & (buckets - 1)) || buckets <= table->num_slots) goto refuse;
    if (table->num_blocks > index_bytes / BLOCK_BYTES) goto refuse;
    uint64_t marks_at = 4096 + table->num_blocks * BLOCK_BYTES;
    uint64_t buckets_at = marks_at + round_up(table->num_slots, 4096);
    if (buckets_at + 8 * buckets > index_bytes) goto refuse;
    if (writable && (table->serving = PyMem_RawCalloc(table->num_blocks + 1, 1)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    table->mask = buckets - 1;
    table->blocks = (Block *)((uint8_t *)table->head + 4096);
    table->marks = (uint8_t *)table->head + marks_at;
    table->buckets = (uint64_t *)((uint8_t *)table->head + buckets_at);
    return 0;
refuse:
    PyErr_SetString(PyExc_ValueError, wrong);
    return -1;
}

static void table_dealloc(PyObject *self) {
    Table *table = (Table *)self;
    if (table->arena_buffer.obj != NULL) PyBuffer_Release(&table->arena_buffer);
    if (table->index_buffer.obj != NULL) PyBuffer_Release(&table->index_buffer);
    PyMem_RawFree(table->serving);
    Py_TYPE(self)->tp_free(self);
}

static Block *block_of(const Table *table, unsigned long long block) {
    if (block < table->num_blocks) return &table->blocks[block];
    PyErr_SetString(PyExc_IndexError, "no such block");
    return NULL;
}

static int check_slot(const Table *table, unsigned long long slot) {
    if (slot < table->num_slots) return 0;
    PyErr_SetString(PyExc_IndexError, "no such slot");
    return -1;
}

/* --- what the server does, under its lock */

static PyObject *set_stamp(PyObject *self, PyObject *args) {
    unsigned long long slot, stamp;
    if (!PyArg_ParseTuple(args, "KK", &slot, &stamp) || check_slot((Table *)self, slot) < 0) return NULL;
    __atomic_store_n(words_of((Table *)self, slot), (uint64_t)stamp, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

/* There is always an empty bucket: there are more buckets than slots, and each slot is in one at most. If there is none,
 * someone else has written there: nothing is answered from it any more, for good. */
static void give_up(Table *table) {
    table->damaged = 1;
    __atomic_store_n(&table->head->answered, NONE, __ATOMIC_SEQ_CST);
}

static void insert(Table *table, uint64_t slot, uint64_t hash) {
    uint64_t tag = hash >> 32, fresh = tag << 32 | (slot + 1), at = tag & table->mask, tries = 0;
    for (; table->buckets[at] != 0 && table->buckets[at] != fresh; at = (at + 1) & table->mask)
        if (tries++ == table->mask) {
            give_up(table);
            return;
        }
    __atomic_store_n(&table->marks[slot], 0, RELAXED);
    __atomic_store_n(&table->buckets[at], fresh, __ATOMIC_RELEASE);
}

static PyObject *show(PyObject *self, PyObject *args) {
    Table *table = (Table *)self;
    unsigned long long slot;
    Py_buffer key;
    if (!PyArg_ParseTuple(args, "Ky*", &slot, &key)) return NULL;
    uint64_t hash = hashing.whole(key.buf, (size_t)key.len, 0);
    PyBuffer_Release(&key);
    if (check_slot(table, slot) < 0) return NULL;
    insert(table, slot, hash);
    Py_RETURN_NONE;
}

/* publish(slot, stamp, start, units, value_bytes, version, expiry_ns, root, key, sums): head of the record, words of the
 * slot, its stamp, and then it is found. The value is in place. */
static PyObject *publish(PyObject *self, PyObject *args) {
    Table *table = (Table *)self;
    unsigned long long slot, stamp, start, units, value_bytes, version, expiry_ns, root;
    Py_buffer key, sums;
    if (!PyArg_ParseTuple(args, "KKKKKKKKy*y*", &slot, &stamp, &start, &units, &value_bytes, &version, &expiry_ns, &root, &key,
                          &sums))
        return NULL;
    uint64_t sums_at = round_up(RECORD_HEAD + (uint64_t)key.len, 8);
    uint64_t value_at = round_up(sums_at + 8 * num_chunks(value_bytes), 64);
    int fits = slot < table->num_slots && start < table->num_granules && units <= table->num_granules - start &&
               value_bytes <= units * GRANULE && value_at + value_bytes <= units * GRANULE &&
               (uint64_t)sums.len == 8 * num_chunks(value_bytes);
    if (fits) {
        uint8_t *record = table->arena + table->data_at + start * GRANULE;
        memset(record, 0, RECORD_HEAD);
        memcpy(record, "GCr1", 4);
        store32(record + 4, (uint32_t)key.len);
        store64(record + 8, value_bytes);
        store64(record + 16, version);
        store64(record + 24, expiry_ns);
        store64(record + 32, hashing.whole(sums.buf, (size_t)sums.len, 0));
        store64(record + 40, root);
        uint64_t own = hashing.whole(key.buf, (size_t)key.len, hashing.whole(record, RECORD_HEAD - 8, 0));
        store64(record + RECORD_HEAD - 8, own);
        memcpy(record + RECORD_HEAD, key.buf, (size_t)key.len);
        memset(record + RECORD_HEAD + key.len, 0, value_at - RECORD_HEAD - (size_t)key.len);
        memcpy(record + sums_at, sums.buf, (size_t)sums.len);
        uint64_t words[7] = {start, units, (uint64_t)key.len, value_bytes, version, own, 0};
        words[6] = hashing.whole(words, 48, 0);
        uint64_t *in_slot = words_of(table, slot);
        for (int i = 0; i < 7; i++) __atomic_store_n(&in_slot[i + 1], words[i], RELAXED);
        __atomic_store_n(&in_slot[0], (uint64_t)stamp, __ATOMIC_SEQ_CST);
        insert(table, slot, hashing.whole(key.buf, (size_t)key.len, 0));
    }
    PyBuffer_Release(&key);
    PyBuffer_Release(&sums);
    if (fits) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "a record that does not fit its place");
    return NULL;
}

/* Later ones of its run move up into the hole, so that no bucket stands behind an empty one that ends its search. */
static void close_hole(Table *table, uint64_t hole) {
    uint64_t tries = 0;
    for (uint64_t at = (hole + 1) & table->mask; table->buckets[at] != 0; at = (at + 1) & table->mask) {
        if (tries++ == table->mask) {
            give_up(table);
            break;
        }
        uint64_t home = (table->buckets[at] >> 32) & table->mask;
        if (((at - home) & table->mask) < ((at - hole) & table->mask)) continue; /* its home lies behind the hole */
        __atomic_store_n(&table->buckets[hole], table->buckets[at], __ATOMIC_RELEASE);
        hole = at;
    }
    __atomic_store_n(&table->buckets[hole], 0, __ATOMIC_RELEASE);
}

static void remove_key(Table *table, uint64_t slot, const void *key, size_t key_bytes) {
    uint64_t tag = hashing.whole(key, key_bytes, 0) >> 32, gone = tag << 32 | (slot + 1);
    uint64_t tries = 0;
    for (uint64_t at = tag & table->mask; table->buckets[at] != 0; at = (at + 1) & table->mask) {
        if (table->buckets[at] == gone) {
            close_hole(table, at);
            return;
        }
        if (tries++ == table->mask) {
            give_up(table);
            return;
        }
    }
}

static PyObject *hide(PyObject *self, PyObject *args) {
    unsigned long long slot;
    Py_buffer key;
    if (!PyArg_ParseTuple(args, "Ky*", &slot, &key)) return NULL;
    remove_key((Table *)self, slot, key.buf, (size_t)key.len);
    PyBuffer_Release(&key);
    Py_RETURN_NONE;
}

/* retire(slot, stamp, key) -> bool: write its dead stamp, hide it (unless the key is empty); whether someone holds it. */
static PyObject *retire(PyObject *self, PyObject *args) {
    Table *table = (Table *)self;
    unsigned long long slot, stamp;
    Py_buffer key;
    if (!PyArg_ParseTuple(args, "KKy*", &slot, &stamp, &key)) return NULL;
    if (check_slot(table, slot) < 0) {
        PyBuffer_Release(&key);
        return NULL;
    }
    __atomic_store_n(words_of(table, slot), (uint64_t)stamp, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (key.len) remove_key(table, slot, key.buf, (size_t)key.len);
    PyBuffer_Release(&key);
    uint64_t wanted = slot;
    return PyBool_FromLong(each_held(table, clock_ns(CLOCK_MONOTONIC), 1, is_slot, &wanted));
}

static PyObject *shown(PyObject *self, PyObject *unused) {
    Table *table = (Table *)self;
    PyObject *list = PyList_New(0);
    for (uint64_t at = 0; list != NULL && at <= table->mask; at++)
        if (table->buckets[at] != 0 && add_slot(list, (table->buckets[at] & UINT32_MAX) - 1)) Py_CLEAR(list);
    return list;
}

static PyObject *is_held(PyObject *self, PyObject *args) {
    unsigned long long slot;
    if (!PyArg_ParseTuple(args, "K", &slot)) return NULL;
    uint64_t wanted = slot;
    return PyBool_FromLong(each_held((Table *)self, clock_ns(CLOCK_MONOTONIC), 1, is_slot, &wanted));
}

static PyObject *held(PyObject *self, PyObject *unused) {
    PyObject *list = PyList_New(0);
    if (list != NULL && each_held((Table *)self, clock_ns(CLOCK_MONOTONIC), 1, add_slot, list)) Py_CLEAR(list);
    return list;
}

static PyObject *take_marks(PyObject *self, PyObject *unused) {
    Table *table = (Table *)self;
    PyObject *list = PyList_New(0);
    for (uint64_t slot = 0; list != NULL && slot < table->num_slots;) {
        if (slot + 8 <= table->num_slots && load64(table->marks + slot) == 0) {
            slot += 8;
            continue;
        }
        if (__atomic_load_n(&table->marks[slot], RELAXED)) {
            __atomic_store_n(&table->marks[slot], 0, RELAXED);
            if (add_slot(list, slot)) Py_CLEAR(list);
        }
        slot++;
    }
    return list;
}

static PyObject *totals(PyObject *self, PyObject *unused) {
    Table *table = (Table *)self;
    uint64_t gets = 0, bytes = 0;
    for (uint64_t i = 0; i < table->num_blocks && i < table->head->top_block; i++) {
        gets += __atomic_load_n(&table->blocks[i].gets, RELAXED);
        bytes += __atomic_load_n(&table->blocks[i].got_bytes, RELAXED);
    }
    return Py_BuildValue("(KKK)", gets, bytes, bytes_held(table));
}

/* Begin or end the use of a block; what it has counted is returned. */
static PyObject *clear_block(PyObject *self, PyObject *args) {
    unsigned long long number;
    Table *table = (Table *)self;
    if (!PyArg_ParseTuple(args, "K", &number)) return NULL;
    Block *block = block_of(table, number);
    if (block == NULL) return NULL;
    PyObject *counted = Py_BuildValue("(KK)", block->gets, block->got_bytes);
    memset(block, 0, sizeof *block);
    if (table->head->top_block <= number) __atomic_store_n(&table->head->top_block, number + 1, __ATOMIC_RELEASE);
    return counted;
}

/* fill(spans, data): copy values into the arena; each span is where it goes, where it begins, and its size. */
static PyObject *fill(PyObject *self, PyObject *args) {
    Table *table = (Table *)self;
    PyObject *spans;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "O!y*", &PyList_Type, &spans, &data)) return NULL;
    uint64_t arena_bytes = (uint64_t)table->arena_buffer.len, data_bytes = (uint64_t)data.len;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(spans); i++) {
        unsigned long long offset, begin, size;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(spans, i), "KKK", &offset, &begin, &size)) break;
        if (table->arena_buffer.readonly || offset < table->data_at || offset > arena_bytes || size > arena_bytes - offset ||
            begin > data_bytes || size > data_bytes - begin) {
            PyErr_SetString(PyExc_ValueError, "a value that does not fit its place");
            break;
        }
        memcpy(table->arena + offset, (const uint8_t *)data.buf + begin, size);
    }
    PyBuffer_Release(&data);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *set_answered(PyObject *self, PyObject *args) {
    unsigned long long epoch;
    if (!PyArg_ParseTuple(args, "K", &epoch)) return NULL;
    if (((Table *)self)->damaged) epoch = NONE;
    __atomic_store_n(&((Table *)self)->head->answered, (uint64_t)epoch, __ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyObject *set_max_held(PyObject *self, PyObject *args) {
    unsigned long long num_bytes;
    if (!PyArg_ParseTuple(args, "K", &num_bytes)) return NULL;
    __atomic_store_n(&((Table *)self)->head->max_held_bytes, (uint64_t)num_bytes, RELAXED);
    Py_RETURN_NONE;
}

static PyObject *beat(PyObject *self, PyObject *unused) {
    __atomic_store_n(&((Table *)self)->head->alive_ns, clock_ns(CLOCK_MONOTONIC), RELAXED);
    Py_RETURN_NONE;
}

/* --- what a client does */

static int is_awake(const Table *table) {
    uint64_t alive_ns = __atomic_load_n(&table->head->alive_ns, RELAXED);
    return clock_ns(CLOCK_MONOTONIC) < alive_ns + ALIVE_NS;
}

/* Whether the server's end of the connection is open; the system closes it once the process has ended, however it has. */
static int lives(int fd) {
    char byte;
    ssize_t got = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
}

static PyObject *view(PyObject *self, PyObject *args) {
    Table *table = (Table *)self;
    int fd;
    unsigned long long number, epoch, value_bytes;
    PyObject *key;
    if (!PyArg_ParseTuple(args, "iKKSK", &fd, &number, &epoch, &key, &value_bytes)) return NULL;
    if (table->ended) Py_RETURN_NONE;
    Block *block = block_of(table, number);
    if (block == NULL) return NULL;
    if (!lives(fd)) Py_RETURN_FALSE;
    const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(key);
    size_t size = (size_t)PyBytes_GET_SIZE(key);
    Found found;
    if (!answers(table, epoch) || !is_awake(table)) Py_RETURN_NONE;
    if (!find(table, bytes, size, hashing.whole(bytes, size, 0), &found)) Py_RETURN_NONE;
    if (value_bytes != ANY_BYTES && value_bytes != found.value_bytes) Py_RETURN_NONE;
    uint64_t index = 0, own = __atomic_load_n(&words_of(table, found.slot)[2], RELAXED) * GRANULE, all = own;
    while (index < HOLDS && table->taken[index]) index++;
    if (index == HOLDS) Py_RETURN_NONE;
    for (uint64_t i = 0; i < table->num_blocks && i < table->head->top_block; i++)
        all += __atomic_load_n(&table->blocks[i].held_bytes, RELAXED);
    /* That counts views whose lease is over, but not yet released: it is looked closely only where it is too much. */
    uint64_t most = __atomic_load_n(&table->head->max_held_bytes, RELAXED);
    if (all > most && own + bytes_held(table) > most) Py_RETURN_NONE;
    if (!hold(table, block, index, &found, clock_ns(CLOCK_MONOTONIC) + table->lease_ns)) Py_RETURN_NONE;
    table->taken[index] = 1;
    table->in_use[index] = own;
    __atomic_store_n(&block->held_bytes, block->held_bytes + table->in_use[index], RELAXED);
    __atomic_store_n(&block->gets, block->gets + 1, RELAXED);
    uint64_t offset = table->data_at + found.start * GRANULE + found.value_at;
    return Py_BuildValue("(KKKKK)", found.slot, found.stamp, offset, found.value_bytes, index);
}

/* From now on nothing is done with the block, which may be another's, nor with the connection. */
static PyObject *end(PyObject *self, PyObject *unused) {
    ((Table *)self)->ended = 1;
    Py_RETURN_NONE;
}

static PyObject *release(PyObject *self, PyObject *args) {
    Table *table = (Table *)self;
    unsigned long long number, index;
    if (!PyArg_ParseTuple(args, "KK", &number, &index)) return NULL;
    Block *block = block_of(table, number);
    if (block == NULL) return NULL;
    if (!table->ended && index < HOLDS && table->taken[index]) {
        table->taken[index] = 0;
        __atomic_store_n(&block->holds[index].slot, 0, __ATOMIC_RELEASE);
        uint64_t held_bytes = block->held_bytes;
        held_bytes = held_bytes > table->in_use[index] ? held_bytes - table->in_use[index] : 0;
        __atomic_store_n(&block->held_bytes, held_bytes, RELAXED);
    }
    Py_RETURN_NONE;
}

static PyObject *generation(PyObject *self, PyObject *args) {
    Table *table = (Table *)self;
    unsigned long long slot;
    if (!PyArg_ParseTuple(args, "K", &slot) || check_slot(table, slot) < 0) return NULL;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return PyLong_FromUnsignedLongLong(__atomic_load_n(words_of(table, slot), __ATOMIC_ACQUIRE) >> 2);
}

/* copy_all(fd, block, epoch, keys, buffers) -> bytes | False: per key 1 if its buffer is filled, 0 if it is not. */
static PyObject *copy_all(PyObject *self, PyObject *args) {
    Table *table = (Table *)self;
    int fd;
    unsigned long long number, epoch;
    PyObject *keys, *buffers;
    if (!PyArg_ParseTuple(args, "iKKO!O!", &fd, &number, &epoch, &PyList_Type, &keys, &PyList_Type, &buffers)) return NULL;
    Block *block = block_of(table, number);
    Py_ssize_t count = PyList_GET_SIZE(keys);
    if (block == NULL) return NULL;
    if (count != PyList_GET_SIZE(buffers)) {
        PyErr_SetString(PyExc_ValueError, "keys and buffers differ in number");
        return NULL;
    }
    if (!table->ended && !lives(fd)) Py_RETURN_FALSE;
    PyObject *answer = PyBytes_FromStringAndSize(NULL, count);
    if (answer == NULL) return NULL;
    uint8_t *done = (uint8_t *)PyBytes_AS_STRING(answer);
    memset(done, 0, (size_t)count);
    uint64_t gets = 0, got_bytes = 0;
    for (Py_ssize_t i = 0; i < count && !table->ended && answers(table, epoch) && is_awake(table); i++) {
        PyObject *key = PyList_GET_ITEM(keys, i);
        Py_buffer into;
        if (!PyBytes_Check(key) || PyObject_GetBuffer(PyList_GET_ITEM(buffers, i), &into, PyBUF_WRITABLE) < 0) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "keys are bytes");
            Py_CLEAR(answer);
            break;
        }
        const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(key);
        size_t size = (size_t)PyBytes_GET_SIZE(key);
        Found found;
        if (find(table, bytes, size, hashing.whole(bytes, size, 0), &found) && found.value_bytes == (uint64_t)into.len) {
            const uint8_t *value = record_of(table, &found) + found.value_at;
            if (into.len > 32 << 10) {
                Py_BEGIN_ALLOW_THREADS
                memcpy(into.buf, value, (size_t)into.len);
                Py_END_ALLOW_THREADS
            } else {
                memcpy(into.buf, value, (size_t)into.len);
            }
            done[i] = (uint8_t)still(table, &found);
            gets += done[i];
            got_bytes += done[i] ? (uint64_t)into.len : 0;
        }
        PyBuffer_Release(&into);
    }
    if (table->ended) return answer; /* while the interpreter's lock was let go */
    __atomic_store_n(&block->gets, block->gets + gets, RELAXED);
    __atomic_store_n(&block->got_bytes, block->got_bytes + got_bytes, RELAXED);
    return answer;
}

static PyMethodDef table_methods[] = {
    {"set_stamp", set_stamp, METH_VARARGS, "Write word 0 of a slot, with a full fence behind it."},
    {"show", show, METH_VARARGS, "Have a slot found by its key."},
    {"publish", publish, METH_VARARGS, "Have a slot's object, whose value is in place, found."},
    {"fill", fill, METH_VARARGS, "Copy values into the arena."},
    {"retire", retire, METH_VARARGS, "Have a dead slot found no more; whether someone holds it."},
    {"hide", hide, METH_VARARGS, "Have it found no more."},
    {"shown", shown, METH_NOARGS, "Slots that are found, for audits."},
    {"is_held", is_held, METH_VARARGS, "Whether someone holds a slot in place."},
    {"held", held, METH_NOARGS, "Slots that someone holds in place."},
    {"take_marks", take_marks, METH_NOARGS, "Slots used since the last call."},
    {"totals", totals, METH_NOARGS, "Gets, bytes got, and bytes held, of all blocks."},
    {"clear_block", clear_block, METH_VARARGS, "Begin or end the use of a block; gets and bytes that it counted."},
    {"set_answered", set_answered, METH_VARARGS, "Say which epoch's requests are answered."},
    {"set_max_held", set_max_held, METH_VARARGS, "Most bytes that holds may keep in place."},
    {"beat", beat, METH_NOARGS, "Say that the server is alive."},
    {"serve", table_serve, METH_VARARGS, "Answer gets on a connection until something else comes."},
    {"view", view, METH_VARARGS, "Hold an object in place and say where it is; False: the server has ended."},
    {"end", end, METH_NOARGS, "A client's use of it has ended: nothing is found or held any more."},
    {"release", release, METH_VARARGS, "Hold it no longer."},
    {"generation", generation, METH_VARARGS, "Of a slot's object; what was read before counts if it is the same."},
    {"copy_all", copy_all, METH_VARARGS, "Fill buffers with objects; False: the server has ended."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject TableType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cygnet.gcache.runtime._core.Table",
    .tp_basicsize = sizeof(Table),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "An arena and its shared index.",
    .tp_new = PyType_GenericNew,
    .tp_init = table_init,
    .tp_dealloc = table_dealloc,
    .tp_methods = table_methods,
};
