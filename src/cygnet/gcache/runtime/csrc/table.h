/* The arena and its shared index, as shared_index.py lays them out.
 *
 * One process, the server, writes the index, under its lock. Anyone reads it at any time; what is read counts only if the
 * slot's stamp was COMMITTED before and is the same afterwards, so a torn or outdated bucket costs no more than a
 * miss, and then the server is asked.
 *
 * Who wants an object to stay in place writes its slot into a hold of its own block, then a full fence, then reads the
 * stamp again. The server writes a dead stamp, then a full fence, then reads the holds. So one of them sees the other.
 */
#ifndef CYGNET_GCACHE_TABLE_H
#define CYGNET_GCACHE_TABLE_H

#include "core.h"

#define BLOCK_BYTES 4096u
#define HOLDS 252u
#define ALIVE_NS 2000000000u /* a server that has not been alive for so long may have been given up: it is asked */
#define NONE UINT64_MAX
#define SENDING UINT64_MAX /* end of a hold that the server has while it sends what is held */
#define ANSWERS_ALL (UINT64_MAX - 1)

typedef struct {
    uint64_t magic, version, num_slots, num_buckets, num_blocks, lease_ns, max_held_bytes;
    uint64_t answered;   /* epoch whose requests are answered; ANSWERS_ALL, NONE */
    uint64_t top_block;  /* blocks from here on have never been used */
    uint64_t incarnation[2];
    uint64_t alive_ns; /* when the server last was, monotonic */
} IndexHead;

typedef struct {
    uint64_t slot; /* plus one; 0: nothing is held */
    uint64_t until_ns;
} Hold;

typedef struct {
    uint64_t top; /* holds from here on have never been used */
    uint64_t held_bytes, gets, got_bytes;
    uint64_t unused[4];
    Hold holds[HOLDS];
} Block;
_Static_assert(sizeof(Block) == BLOCK_BYTES, "a block is a page");

typedef struct {
    PyObject_HEAD
    Py_buffer arena_buffer, index_buffer;
    uint8_t *arena;
    IndexHead *head;
    Block *blocks;
    uint8_t *marks;
    uint8_t *serving; /* of the server: blocks whose holds are its own; under the interpreter's lock */
    uint64_t *buckets;
    uint64_t num_slots, data_at, num_granules;
    uint64_t mask; /* buckets less one */
    uint64_t num_blocks, lease_ns;
    uint64_t in_use[HOLDS];   /* bytes held by each hold of a client; under the interpreter's lock */
    uint8_t taken[HOLDS];
    int damaged; /* the buckets, which are the server's alone to write */
    int ended; /* a client's use of it, and of its block; under the interpreter's lock */
} Table;

typedef struct {
    uint64_t slot, stamp, start, value_bytes, version, value_at, sums_at;
} Found;

static inline uint64_t *words_of(const Table *table, uint64_t slot) {
    return (uint64_t *)(table->arena + 4096 + slot * 64);
}
static inline uint8_t *record_of(const Table *table, const Found *found) {
    return table->arena + table->data_at + found->start * GRANULE;
}

int find(const Table *table, const uint8_t *key, size_t key_bytes, uint64_t hash, Found *found);
int still(const Table *table, const Found *found);
int hold(const Table *table, Block *block, uint64_t index, const Found *found, uint64_t until_ns);
void let_go(Block *block, uint64_t count);
int answers(const Table *table, uint64_t epoch);
PyObject *table_serve(PyObject *self, PyObject *args);

#endif
