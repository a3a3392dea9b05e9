/* Counts the lines of a weight, or of a part of the KV cache, that the kernels load and prefetch. All sources share the
 * counters. These do not depend on the optimization, which takes half of the compilation. */
#pragma GCC optimize("O1")
#include <immintrin.h>
#include <stdint.h>

typedef struct {
    const char *start, *stop; /* of the counted lines */
    const char *next; /* the line after the last that was loaded */
    int64_t num_loads, num_jumps; /* lines that were loaded; of them not after the one before */
    uint8_t *num_fetches; /* of each line */
} CountedReads;
__attribute__((visibility("default"), weak)) CountedReads counted_reads;

static inline const void *count_load(const void *line) {
    const char *at = (const char *)line;
    if (at < counted_reads.start || at >= counted_reads.stop) return line;
    counted_reads.num_loads++;
    counted_reads.num_jumps += at != counted_reads.next;
    counted_reads.next = at + 64;
    return line;
}
static inline void count_fetch(const void *line) {
    const char *at = (const char *)line;
    if (at >= counted_reads.start && at < counted_reads.stop) counted_reads.num_fetches[(at - counted_reads.start) / 64]++;
}
static inline __m512i load_uncounted(const void *line) { return _mm512_load_si512(line); }

#undef _mm_prefetch
#define _mm_prefetch(line, hint) count_fetch(line)
#define _mm512_load_si512(line) load_uncounted(count_load(line))
