/* What the parts of cygnet.gcache.runtime._core share. Numbers and layouts are those of record.py, protocol.py and
 * shared_index.py; little-endian machines only (core.c refuses others). */
#ifndef CYGNET_GCACHE_CORE_H
#define CYGNET_GCACHE_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <sys/uio.h>

#define CORE_VERSION 2

/* --- xxh3, of the library that the xxhash package brings */

typedef struct {
    uint64_t (*whole)(const void *, size_t, uint64_t);
    void *(*create)(void);
    int (*destroy)(void *);
    int (*reset)(void *, uint64_t);
    int (*update)(void *, const void *, size_t);
    uint64_t (*digest)(const void *);
} Hashing;
extern Hashing hashing;

/* --- layouts */

#define GRANULE 512u
#define CHUNK_BYTES ((uint64_t)1 << 20)
#define RECORD_HEAD 64u
#define HEAD_BYTES 40u
#define WANT_BYTES 18u
#define GOT_BYTES 28u
#define MAX_KEY_BYTES 4096u
#define MAX_FRAME_BYTES ((uint64_t)1 << 30)
#define ANY_BYTES UINT64_MAX
#define COMMITTED 2u

enum { OP_GET = 3, OP_PUT = 4 };

static inline uint64_t num_chunks(uint64_t bytes) { return bytes / CHUNK_BYTES + (bytes % CHUNK_BYTES != 0); }
static inline uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
static inline uint64_t load64(const void *at) { uint64_t v; __builtin_memcpy(&v, at, 8); return v; }
static inline uint32_t load32(const void *at) { uint32_t v; __builtin_memcpy(&v, at, 4); return v; }
static inline uint16_t load16(const void *at) { uint16_t v; __builtin_memcpy(&v, at, 2); return v; }
static inline void store64(void *at, uint64_t v) { __builtin_memcpy(at, &v, 8); }
static inline void store32(void *at, uint32_t v) { __builtin_memcpy(at, &v, 4); }
static inline void store16(void *at, uint16_t v) { __builtin_memcpy(at, &v, 2); }

/* --- io.c: whole transfers over a socket; without the interpreter's lock unless they say so */

int64_t now_ms(void);
/* 1: all of it; 0: the peer has closed, or the deadline (monotonic ms, negative: none) has passed; -1: errno. */
int receive_all(int fd, uint8_t *into, size_t count, int64_t deadline_ms);
int send_parts(int fd, struct iovec *parts, size_t count, int64_t deadline_ms);
extern PyMethodDef io_methods[];

/* --- batch.c */

extern PyMethodDef batch_methods[];

/* --- table.c */

extern PyTypeObject TableType;

#endif
