/* AMX's tiles in plain C, so that the AMX level of the kernels runs on a processor with AVX512-BF16 alone. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
} EmulatedConfig;
static _Thread_local EmulatedConfig emulated_config;
static _Thread_local uint8_t emulated_tiles[8][16][64];

static inline void emulated_load(int tile, const void *from, int64_t stride) {
    memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile]);
    for (int row = 0; row < emulated_config.num_rows[tile]; row++)
        memcpy(emulated_tiles[tile][row], (const char *)from + row * stride, emulated_config.row_bytes[tile]);
}
static inline void emulated_store(int tile, void *to, int64_t stride) {
    for (int row = 0; row < emulated_config.num_rows[tile]; row++)
        memcpy((char *)to + row * stride, emulated_tiles[tile][row], emulated_config.row_bytes[tile]);
}
static inline float emulated_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
/* sums[row][output] += a[row][2 pair] * b[pair][2 output] + a[row][2 pair + 1] * b[pair][2 output + 1] */
static inline void emulated_dot(int sums, int a, int b) {
    for (int row = 0; row < emulated_config.num_rows[a]; row++)
        for (int pair = 0; pair < emulated_config.row_bytes[a] / 4; pair++) {
            uint32_t left = ((uint32_t *)emulated_tiles[a][row])[pair];
            for (int output = 0; output < emulated_config.row_bytes[b] / 4; output++) {
                uint32_t right = ((uint32_t *)emulated_tiles[b][pair])[output];
                ((float *)emulated_tiles[sums][row])[output] +=
                    emulated_float(left << 16) * emulated_float(right << 16) +
                    emulated_float(left & 0xffff0000) * emulated_float(right & 0xffff0000);
            }
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) memcpy(&emulated_config, config, sizeof emulated_config)
#define _tile_release() ((void)0)
#define _tile_zero(tile) memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated_dot(sums, a, b)
#define __AMX_BF16__ 1
