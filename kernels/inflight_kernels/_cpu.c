// Inference kernels for CPUs, each the twin of a PyTorch reference beside it. `_cpu.py` compiles this file on first use
// for the machine at hand and calls it through ctypes.
//
// Tensors are float32 or bfloat16; arithmetic is float32. Work is spread with OpenMP over `threads` threads of the
// runtime that PyTorch has loaded. Vectors are GCC's.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define BLOCK 16        // tokens in a block of the paged cache
#define WIDE 16         // results of a tile of `linear`, channels that `short_convolution` takes together
#define CHUNK 64        // context tokens whose scores are held at a time
#define MAX_ROWS 8      // query rows that share one read of the keys
#define MAX_HEAD 512
#define MAX_LATENT 640   // 512 numbers of a latent and 64 of a rotated key, and some more
#define MAX_HIDDEN 16384
#define SAMPLE_BLOCK 1024

typedef float wf __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t wi __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t bf16;

// Vectors have LANES numbers and are as wide as the registers: GCC sends operations of wider ones through memory.
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#if !defined(__clang__) && __GNUC__ < 12
#define __builtin_shufflevector(a, b, ...) \
    __builtin_shuffle(a, b, __builtin_choose_expr(sizeof(a) == 64, (wi){__VA_ARGS__}, (vi){__VA_ARGS__}))
#endif

static inline float load1(const void *base, int is_bf16, ptrdiff_t i) {
    if (!is_bf16) return ((const float *)base)[i];
    uint32_t bits = (uint32_t)((const bf16 *)base)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint16_t round_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float rounded1(float x, int is_bf16) {
    const bf16 bits = is_bf16 ? round_bf16(x) : 0;
    return is_bf16 ? load1(&bits, 1, 0) : x;
}

static inline void store1(void *base, int is_bf16, ptrdiff_t i, float x) {
    if (is_bf16) ((bf16 *)base)[i] = round_bf16(x);
    else ((float *)base)[i] = x;
}

static inline vf load(const void *base, int is_bf16, ptrdiff_t i) {
    if (!is_bf16) return *(const vf *)((const float *)base + i);
    vu bits = __builtin_convertvector(*(const vh *)((const bf16 *)base + i), vu) << 16;
    return (vf)bits;
}

static inline vf rounded(vf x) {  // to the nearest bfloat16, still as floats
    vu bits = (vu)x;
    vu up = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    vu nan = (bits | 0x400000u) & 0xffff0000u;
    vi is_nan = (vi)((bits & 0x7fffffffu) > 0x7f800000u);
    return (vf)((up & ~(vu)is_nan) | (nan & (vu)is_nan));
}

static inline void store(void *base, int is_bf16, ptrdiff_t i, vf x) {
    if (is_bf16) *(vh *)((bf16 *)base + i) = __builtin_convertvector((vu)rounded(x) >> 16, vh);
    else *(vf *)((float *)base + i) = x;
}

static inline wf load_wide(const void *base, int is_bf16, ptrdiff_t i) {
    wf x;
    for (int part = 0; part < WIDE; part += LANES) ((vf *)&x)[part / LANES] = load(base, is_bf16, i + part);
    return x;
}

static inline void store_wide(void *base, int is_bf16, ptrdiff_t i, wf x) {
    for (int part = 0; part < WIDE; part += LANES) store(base, is_bf16, i + part, ((vf *)&x)[part / LANES]);
}

static inline vf splat(float x) { return x - (vf){0}; }

static inline vf blend(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

static inline vf maxv(vf a, vf b) { return blend((vi)(a > b), a, b); }

static inline float sum(vf x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

static inline float max1(vf x) {
    float peak = x[0];
    for (int i = 1; i < LANES; i++) peak = x[i] > peak ? x[i] : peak;
    return peak;
}

// e^x for x <= 88, relative error below 2e-7; 0 below -87. Polynomial of Cephes' expf.
static inline vf expv(vf x) {
    vi tiny = (vi)(x < -87.0f);
    x = blend((vi)(x > 88.0f), splat(88.0f), blend(tiny, splat(-87.0f), x));
    vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vf f = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = ((((1.9875691500e-4f * f + 1.3981999507e-3f) * f + 8.3334519073e-3f) * f + 4.1665795894e-2f) * f +
            1.6666665459e-1f) * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    vf power = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    return blend(tiny, splat(0), p * power);
}

// By e^2x; near 0, where that loses digits, by a series.
static inline vf tanhv(vf x) {
    const vf square = x * x, far = 1.0f - 2.0f / (expv(2.0f * x) + 1.0f);
    const vf near = x * (1.0f - square * (0.333333333f - square * (0.133333333f - square * 0.0539682540f)));
    return blend((vi)(square < 0.0625f), near, far);
}

// ---- attention over a paged cache --------------------------------------------------------------------------------
//
// keys [blocks, Hk, D, BLOCK] (transposed, so that BLOCK scores lie side by side), values [blocks, Hk, BLOCK, Dv].
// queries [T, Hq, D] and out [T, Hq, Dv] are contiguous. Sequence s has the queries starts[s] .. starts[s+1], the last
// of which sits at position contexts[s] - 1; its block numbers are tables[s, 0 ...].

typedef struct {
    const void *q, *k, *v;
    void *out;
    int bf;
    int q_heads, kv_heads, dim, value_dim;
    float scale, softcap;
    int window;          // 0: full attention
    const float *sinks;  // [Hq] or NULL
} Attention;

// Turns the scores of CHUNK keys from `start` on into weights, for each of `rows` rows, whose sums so far it scales.
static inline __attribute__((always_inline)) void weigh(const Attention *a, const int rows, int64_t start,
        const int64_t *position, float (*weight)[CHUNK], float *peak, float *total, float *acc, int acc_stride) {
    for (int r = 0; r < rows; r++) {
        if (a->softcap != 0)
            for (int t = 0; t < CHUNK; t += LANES)
                *(vf *)&weight[r][t] = a->softcap * tanhv(*(vf *)&weight[r][t] / a->softcap);
        const int all_visible = start + CHUNK - 1 <= position[r] && !(a->window && start <= position[r] - a->window);
        for (int t = 0; t < CHUNK && !all_visible; t++) {
            const int64_t key = start + t;
            const int hidden = key > position[r] || (a->window && key <= position[r] - a->window);
            weight[r][t] = hidden ? -INFINITY : weight[r][t];
        }
        vf top = splat(-INFINITY);
        for (int t = 0; t < CHUNK; t += LANES) top = maxv(top, *(vf *)&weight[r][t]);
        const float high = max1(top);
        if (!(high <= peak[r])) {  // higher, or NaN
            const float shrink = peak[r] == -INFINITY ? 0 : expf(peak[r] - high);
            total[r] *= shrink;
            for (int d = 0; d < a->value_dim; d += LANES) *(vf *)&acc[r * acc_stride + d] *= shrink;
            peak[r] = high;
        }
        const float base = peak[r] == -INFINITY ? 0 : peak[r];
        vf mass = {0};
        for (int t = 0; t < CHUNK; t += LANES) {
            const vf w = expv(*(vf *)&weight[r][t] - base);
            *(vf *)&weight[r][t] = w;
            mass += w;
        }
        total[r] += sum(mass);
    }
}

// `rows` query rows (tokens x query heads of one KV head) of one sequence. Row r is token first + r / group.
static inline __attribute__((always_inline)) void attend_rows(const Attention *a, const int rows, int real_rows,
        int64_t first_token, int64_t first_position, int kv_head, const int32_t *table) {
    const int group = a->q_heads / a->kv_heads, D = a->dim, Dv = a->value_dim, bf = a->bf, size = bf ? 2 : 4;
    float query[MAX_ROWS][MAX_HEAD] __attribute__((aligned(64)));
    float acc[MAX_ROWS][MAX_HEAD] __attribute__((aligned(64)));
    float weight[MAX_ROWS][CHUNK] __attribute__((aligned(64)));
    float peak[MAX_ROWS], total[MAX_ROWS];
    int64_t position[MAX_ROWS];

    for (int r = 0; r < rows; r++) {
        const int real = r < real_rows ? r : 0;
        const int64_t token = first_token + real / group;
        const int head = kv_head * group + real % group;
        position[r] = first_position + real / group;
        for (int d = 0; d < D; d += LANES)
            *(vf *)&query[r][d] = load(a->q, bf, (token * a->q_heads + head) * D + d) * a->scale;
        memset(acc[r], 0, sizeof(float) * Dv);
        peak[r] = a->sinks ? a->sinks[head] : -INFINITY;
        total[r] = a->sinks ? 1.0f : 0.0f;
    }
    const int64_t last = position[real_rows - 1];
    int64_t begin = a->window ? position[0] - a->window + 1 : 0;
    begin = begin < 0 ? 0 : begin / BLOCK * BLOCK;

    for (int64_t start = begin; start <= last; start += CHUNK) {
        const int count = last + 1 - start < CHUNK ? (int)(last + 1 - start) : CHUNK;
        for (int b = 0; b < count; b += BLOCK) {
            const int64_t block = table[(start + b) / BLOCK];
            const ptrdiff_t base = (block * a->kv_heads + kv_head) * D * BLOCK;
            // What comes next is fetched meanwhile: the values of this block, the keys of the one behind it.
            const int64_t later = start + b + BLOCK <= last ? table[(start + b) / BLOCK + 1] : block;
            const char *next_k = (const char *)a->k + (later * a->kv_heads + kv_head) * D * BLOCK * size;
            const char *this_v = (const char *)a->v + (block * a->kv_heads + kv_head) * Dv * BLOCK * size;
            for (int part = 0; part < BLOCK; part += LANES) {
                vf score[MAX_ROWS];
                for (int r = 0; r < rows; r++) score[r] = (vf){0};
                for (int d = 0; d < D; d++) {
                    if (!part && d * BLOCK * size % 64 == 0) {
                        __builtin_prefetch(next_k + d * BLOCK * size);
                        __builtin_prefetch(this_v + d * BLOCK * size);
                    }
                    const vf key = load(a->k, bf, base + (ptrdiff_t)d * BLOCK + part);
                    for (int r = 0; r < rows; r++) score[r] += query[r][d] * key;
                }
                for (int r = 0; r < rows; r++) *(vf *)&weight[r][b + part] = score[r];
            }
        }
        weigh(a, rows, start, position, weight, peak, total, &acc[0][0], MAX_HEAD);
        for (int b = 0; b < count; b += BLOCK) {
            const int64_t block = table[(start + b) / BLOCK];
            const ptrdiff_t base = (block * a->kv_heads + kv_head) * BLOCK * (ptrdiff_t)Dv;
            const int here = count - b < BLOCK ? count - b : BLOCK;
            for (int d = 0; d < Dv; d += LANES) {
                vf mix[MAX_ROWS];
                for (int r = 0; r < rows; r++) mix[r] = *(vf *)&acc[r][d];
                for (int t = 0; t < here; t++) {
                    const vf value = load(a->v, bf, base + (ptrdiff_t)t * Dv + d);
                    for (int r = 0; r < rows; r++) mix[r] += weight[r][b + t] * value;
                }
                for (int r = 0; r < rows; r++) *(vf *)&acc[r][d] = mix[r];
            }
        }
    }
    for (int r = 0; r < real_rows; r++) {
        const int64_t token = first_token + r / group;
        const int head = kv_head * group + r % group;
        for (int d = 0; d < Dv; d += LANES)
            store(a->out, bf, (token * a->q_heads + head) * Dv + d, *(vf *)&acc[r][d] / total[r]);
    }
}

static void attend_tile(const Attention *a, int real_rows, int64_t token, int64_t position, int kv_head,
        const int32_t *table) {
    if (real_rows == 1) attend_rows(a, 1, real_rows, token, position, kv_head, table);
    else if (real_rows == 2) attend_rows(a, 2, real_rows, token, position, kv_head, table);
    else if (real_rows <= 4) attend_rows(a, 4, real_rows, token, position, kv_head, table);
    else attend_rows(a, MAX_ROWS, real_rows, token, position, kv_head, table);
}

// Returns 0, or 1 if a size is out of range (nothing is written then).
int paged_attention(const void *q, const void *k, const void *v, void *out, int bf, const int32_t *tables,
        int64_t table_stride, const int32_t *starts, const int32_t *contexts, int64_t sequences, int q_heads,
        int kv_heads, int dim, int value_dim, float scale, float softcap, int window, const float *sinks, int threads) {
    if (dim % LANES || value_dim % LANES || dim > MAX_HEAD || value_dim > MAX_HEAD || q_heads / kv_heads > MAX_ROWS)
        return 1;
    const Attention a = {q, k, v, out, bf, q_heads, kv_heads, dim, value_dim, scale, softcap, window, sinks};
    const int group = q_heads / kv_heads, tile = MAX_ROWS / group;
#pragma omp parallel for schedule(dynamic, 1) collapse(2) num_threads(threads)
    for (int64_t s = 0; s < sequences; s++)
        for (int head = 0; head < kv_heads; head++) {
            const int64_t count = starts[s + 1] - starts[s];
            for (int64_t i = 0; i < count; i += tile) {
                const int64_t tokens = count - i < tile ? count - i : tile;
                attend_tile(&a, (int)tokens * group, starts[s] + i, contexts[s] - count + i, head,
                            tables + s * table_stride);
            }
        }
    return 0;
}

// ---- products with weights as they lie in a slot -----------------------------------------------------------------
//
// y [T, N] = x [T, K] . w [N, K]^T (+ bias). Both operands are read along K, so nothing is packed or transposed: a tile
// of ROWS x TILE results is that many vectors of partial sums, which are added up across their lanes at the end. A
// product of few rows waits for w, so each tile fetches a share of the rows of w that come next. A row of y is the same,
// bit for bit, whatever rows are beside it. More rows than MOST_FLOATS or MOST_BF16 are refused: packing pays then, and
// AMX sooner. Where pairs of bfloat16 cannot be multiplied, nobody else is quicker with any number of rows.

#define TILE 4
#define PANEL 8           // rows of w that stay in the first-level cache while all rows of x pass by
#define DEPTH_BYTES 2048  // of a row at a time, so that they do
#define GROUP_TOKENS 48   // rows of x that pass by together
#define X_BYTES (1 << 20) // of x, all of which passes by one panel before the next
#define SMALL_MATRIX (1 << 20)  // numbers of an expert's matrix
#ifdef __AVX512F__
#define MOST_FLOATS INT64_MAX
#else
#define MOST_FLOATS 32
#endif
#if defined(__AMX_BF16__)
#define MOST_BF16 8
#elif defined(__AVX512BF16__)
#define MOST_BF16 GROUP_TOKENS
#else
#define MOST_BF16 INT64_MAX
#endif

#define MERGE __builtin_shufflevector

#if defined(__AVX512F__)

#define ROWS 4  // so that the sums, ROWS vectors of x and one of w have registers
#define TILE_FUNCTION static inline __attribute__((always_inline))
#define KEEP(x) __asm__("" : "+v"(x))  // in a register: GCC would load it again for each product

static inline vu high_halves(vu x) { return x & 0xffff0000u; }

// Lane i of the result is the sum over the lanes of acc[i]; within 128 bits first, as that is cheap.
static inline wf sums_of(wf acc[16]) {
    for (int i = 0; i < 8; i++)
        acc[i] = MERGE(acc[2 * i], acc[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 MERGE(acc[2 * i], acc[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    for (int i = 0; i < 4; i++)
        acc[i] = MERGE(acc[2 * i], acc[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                 MERGE(acc[2 * i], acc[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; i++)
        acc[i] = MERGE(acc[2 * i], acc[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 MERGE(acc[2 * i], acc[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    return MERGE(acc[0], acc[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           MERGE(acc[0], acc[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

#elif defined(__AVX2__) && defined(__FMA__)

#define ROWS 3
#define TILE_FUNCTION static __attribute__((noinline))  // or what one keeps in registers is kept from the others
#define KEEP(x) __asm__("" : "+x"(x))

static inline vu high_halves(vu x) {
#define HIGH 0xffff0000u
    static const vu mask = {HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH};
    __asm__("vpand %1, %0, %0" : "+x"(x) : "m"(mask));  // no register is left for it
    return x;
}

static inline wf sums_of(vf acc[12]) {
    float sums[WIDE] __attribute__((aligned(64))) = {0};
    for (int i = 0; i < 12; i += 4) {
        vf pair[2];
        for (int j = 0; j < 2; j++)
            pair[j] = MERGE(acc[i + 2 * j], acc[i + 2 * j + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                      MERGE(acc[i + 2 * j], acc[i + 2 * j + 1], 1, 9, 3, 11, 5, 13, 7, 15);
        const vf halves = MERGE(pair[0], pair[1], 0, 1, 8, 9, 4, 5, 12, 13) +
                          MERGE(pair[0], pair[1], 2, 3, 10, 11, 6, 7, 14, 15);
        for (int j = 0; j < 4; j++) sums[i + j] = halves[j] + halves[4 + j];
    }
    return *(wf *)sums;
}

#endif

#ifdef ROWS

// Without products of pairs of bfloat16, every second one is read as floats at a time.
#ifdef __AVX512BF16__
#define PASSES(bf) 1
#else
#define PASSES(bf) ((bf) ? 2 : 1)
#endif

static inline __attribute__((always_inline)) vf operand(const char *at, const int pass, const int bf) {
    vu bits = *(const vu *)at;
    if (PASSES(bf) == 2 && pass) bits = high_halves(bits);
    else if (PASSES(bf) == 2) bits <<= 16;
    return (vf)bits;
}

static inline __attribute__((always_inline)) vf multiply_add(vf sum, vf a, vf b, const int bf) {
#ifdef __AVX512BF16__
    if (bf) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    return sum + a * b;
}

// acc[TILE i + j] += products of what x[i] and w[j] have at so many bytes
static inline __attribute__((always_inline)) void multiply_vectors(vf acc[ROWS * TILE], const char *const *x,
        const char *const *w, int at, const int pass, const int bf) {
    vf a[ROWS];
    for (int i = 0; i < ROWS; i++) {
        a[i] = operand(x[i] + at, pass, bf);
        KEEP(a[i]);
    }
    for (int j = 0; j < TILE; j++) {
        vf b = operand(w[j] + at, pass, bf);
        KEEP(b);
        for (int i = 0; i < ROWS; i++) acc[TILE * i + j] = multiply_add(acc[TILE * i + j], a[i], b, bf);
    }
}

// Lane TILE i + j of the result is x[i] . w[j] over so many bytes. Meanwhile as many bytes are fetched of each of
// `fetched` rows, which begin at `next` and are `distance` apart.
static inline __attribute__((always_inline)) wf multiply_tile(const char *const *x, const char *const *w, int bytes,
        const char *next, int64_t distance, const int fetched, const int bf) {
    vf acc[ROWS * TILE];
    for (int i = 0; i < ROWS * TILE; i++) acc[i] = (vf){0};
    for (int at = 0; at < bytes; at += 64) {
        for (int row = 0; row < fetched; row++) __builtin_prefetch(next + row * distance + at, 0, 2);
#pragma GCC unroll 2
        for (int part = 0; part < 64; part += (int)sizeof(vf)) {
            multiply_vectors(acc, x, w, at + part, 0, bf);
            if (PASSES(bf) == 2) multiply_vectors(acc, x, w, at + part, 1, bf);
        }
    }
    return sums_of(acc);
}

#define FETCHING(name, fetched, bf) \
    TILE_FUNCTION wf name##fetched(const char *const *x, const char *const *w, int bytes, const char *next, \
                                   int64_t distance) { \
        return multiply_tile(x, w, bytes, next, distance, fetched, bf); \
    }
#define TILE_FUNCTIONS(name, bf) \
    FETCHING(name, 0, bf) FETCHING(name, 1, bf) FETCHING(name, 2, bf) FETCHING(name, 4, bf)
TILE_FUNCTIONS(tile_of_floats, 0)
TILE_FUNCTIONS(tile_of_bf16, 1)

// sums[i][j]: tile of the rows ROWS i ... of x and the rows TILE j ... of w. The tiles share the work of fetching the
// next panel.
static inline __attribute__((always_inline)) void multiply_panel(const char *x, int64_t x_bytes, int64_t rows,
        const char *w, int64_t columns, int64_t bytes, int fetch, wf (*sums)[PANEL / TILE], const int bf) {
    const int64_t tiles = PANEL / TILE * ((rows + ROWS - 1) / ROWS);
    const int64_t turns = tiles < PANEL ? 1 : tiles / PANEL, each = tiles >= PANEL ? 1 : tiles > 2 ? 2 : 4;
    for (int64_t from = 0; from < bytes; from += DEPTH_BYTES) {
        const int depth = bytes - from < DEPTH_BYTES ? (int)(bytes - from) : DEPTH_BYTES;
        int64_t turn = 0, fetched = 0;
        for (int64_t m = 0; m < rows; m += ROWS) {
            const char *x_rows[ROWS];  // beyond the last one it is repeated
            for (int i = 0; i < ROWS; i++) x_rows[i] = x + (m + i < rows ? m + i : rows - 1) * x_bytes + from;
            for (int64_t n = 0; n < columns; n += TILE) {
                const char *w_rows[TILE], *next = w + (PANEL + fetched) * bytes + from;
                for (int j = 0; j < TILE; j++) w_rows[j] = w + (n + j < columns ? n + j : columns - 1) * bytes + from;
                const int64_t more = fetch && fetched < PANEL && turn++ % turns == 0 ? each : 0;
                fetched += more;
#define TILE_BY(fetched) (bf ? tile_of_bf16##fetched : tile_of_floats##fetched)(x_rows, w_rows, depth, next, bytes)
                const wf tile = more == 0 ? TILE_BY(0) : more == 1 ? TILE_BY(1) : more == 2 ? TILE_BY(2) : TILE_BY(4);
                wf *sum = &sums[m / ROWS][n / TILE];
                *sum = tile + (from ? *sum : (wf){0});
            }
        }
    }
}

static inline __attribute__((always_inline)) void store_panel(wf (*sums)[PANEL / TILE], int64_t rows, int64_t columns,
        const void *bias, ptrdiff_t first, void *y, int64_t y_stride, const int bf) {
    const int size = bf ? 2 : 4;
    wf shifts[PANEL / TILE];
    for (int64_t n = 0; n < columns; n += TILE) {
        wf shift = {0};
        for (int i = 0; bias && i < WIDE; i++)
            shift[i] = n + i % TILE < columns ? load1(bias, bf, first + n + i % TILE) : 0;
        shifts[n / TILE] = shift;
    }
    for (int64_t m = 0; m < rows; m += ROWS)
        for (int64_t n = 0; n < columns; n += TILE) {
            const int64_t real = columns - n < TILE ? columns - n : TILE;
            char tile[WIDE * 4] __attribute__((aligned(64)));
            store_wide(tile, bf, 0, sums[m / ROWS][n / TILE] + shifts[n / TILE]);
            for (int64_t i = 0; i < ROWS && m + i < rows; i++) {
                char *to = (char *)y + ((m + i) * y_stride + first + n) * size;
                if (real == TILE) memcpy(to, tile + i * TILE * size, TILE * size);
                else memcpy(to, tile + i * TILE * size, real * size);
            }
        }
}

// Writes the columns from n on, at most PANEL of them, of x [rows, K] . w [N, K]^T to y [rows, N].
static void multiply_rows(const void *x, int64_t x_stride, int64_t rows, const void *w, const void *bias, int64_t n,
        void *y, int64_t outputs, int64_t inputs, int fetch, int bf) {
    const int64_t size = bf ? 2 : 4, bytes = inputs * size, columns = outputs - n < PANEL ? outputs - n : PANEL;
    wf sums[GROUP_TOKENS / ROWS][PANEL / TILE] __attribute__((aligned(64)));
    const char *panel = (const char *)w + n * bytes;
    if (bf) {
        multiply_panel(x, x_stride * size, rows, panel, columns, bytes, fetch, sums, 1);
        store_panel(sums, rows, columns, bias, n, y, outputs, 1);
    } else {
        multiply_panel(x, x_stride * size, rows, panel, columns, bytes, fetch, sums, 0);
        store_panel(sums, rows, columns, bias, n, y, outputs, 0);
    }
}

// Returns 0, or 1 where this processor or these sizes need another product.
int linear(const void *x, int64_t x_stride, const void *w, const void *bias, void *y, int bf, int64_t tokens,
        int64_t outputs, int64_t inputs, int threads) {
    const int64_t size = bf ? 2 : 4, bytes = inputs * size;
    if (bytes % 64 || tokens < 1 || tokens > (bf ? MOST_BF16 : MOST_FLOATS)) return 1;
    const int64_t groups = X_BYTES / (GROUP_TOKENS * bytes), block = GROUP_TOKENS * (groups > 1 ? groups : 1);
#pragma omp parallel num_threads(threads)
    for (int64_t first = 0; first < tokens; first += block) {
        const int64_t end = tokens - first < block ? tokens : first + block;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < outputs; n += PANEL)
            for (int64_t t = first; t < end; t += GROUP_TOKENS)
                multiply_rows((const char *)x + t * x_stride * size, x_stride,
                              end - t < GROUP_TOKENS ? end - t : GROUP_TOKENS, w, bias, n,
                              (char *)y + t * outputs * size, outputs, inputs, t == first, bf);
    }
    return 0;
}

// Writes where runs of neighbouring rows of one group start, each of at most GROUP_TOKENS rows, and the end. Returns the
// number of runs; 0 where another product is needed: many rows per group unless `any_rows`, no rows, or a group that is
// out of range. numbers: of a matrix. With small ones, libraries are faster only from more rows on.
static int64_t find_runs(const int64_t *groups, int64_t count, int64_t rows, int64_t numbers, int bf, int any_rows,
        int64_t *starts) {
    const int64_t most = bf ? MOST_BF16 : MOST_FLOATS, compared = numbers > SMALL_MATRIX ? rows : rows / 4;
    int64_t runs = 0, changes = 0;
    for (int64_t t = 0; t < rows; t++) {
        const int changed = t == 0 || groups[t] != groups[t - 1];
        if (groups[t] < 0 || groups[t] >= count) return 0;
        changes += changed;
        if (changed || t - starts[runs - 1] == GROUP_TOKENS) starts[runs++] = t;
    }
    starts[runs] = rows;
    return !any_rows && most < compared && compared > changes * most ? 0 : runs;
}

// y[t] = x[t] . w[groups[t]]^T + bias[groups[t]] with w [count, N, K] and bias [count, N] or NULL. Neighbouring rows of
// one group share a read of its matrix. Returns 0, or 1 where another product is needed: for the reasons of `linear` and
// of `find_runs`.
int grouped_linear(const void *x, int64_t x_stride, const void *w, const void *bias, const int64_t *groups,
        int64_t count, void *y, int bf, int64_t rows, int64_t outputs, int64_t inputs, int any_rows, int threads) {
    const int64_t size = bf ? 2 : 4, bytes = inputs * size, panels = (outputs + PANEL - 1) / PANEL;
    int64_t *starts = bytes % 64 ? NULL : malloc((rows + 1) * sizeof *starts);
    const int64_t runs = starts ? find_runs(groups, count, rows, outputs * inputs, bf, any_rows, starts) : 0;
#pragma omp parallel for schedule(guided, 8) num_threads(threads)
    for (int64_t item = 0; item < runs * panels; item++) {
        const int64_t first = starts[item / panels];
        multiply_rows((const char *)x + first * x_stride * size, x_stride, starts[item / panels + 1] - first,
                      (const char *)w + groups[first] * outputs * bytes,
                      bias ? (const char *)bias + groups[first] * outputs * size : NULL, item % panels * PANEL,
                      (char *)y + first * outputs * size, outputs, inputs, 1, bf);
    }
    free(starts);
    return runs == 0;
}

#define STEP 4             // rows of a transposed matrix that are multiplied together
#define LEAST_COLUMNS 256  // that a thread takes: fewer are short, separate pieces of memory
#define MOST_COLUMNS 2048  // whose sums stay in the second-level cache

// sums[i] += the products of STEP numbers of each row of x with as many rows of w, which are `columns` long.
static inline __attribute__((always_inline)) void add_products(const float *const *x, const char *w, int64_t bytes,
        int64_t columns, int fetch, float *const *sums, const int bf) {
    const int size = bf ? 2 : 4;
    vf a[ROWS][STEP];
    for (int i = 0; i < ROWS; i++)
        for (int q = 0; q < STEP; q++) {
            a[i][q] = x[i][q] - (vf){0};
            KEEP(a[i][q]);
        }
    for (int64_t n = 0; n < columns; n += LANES) {
        vf sum[ROWS];
        for (int i = 0; i < ROWS; i++) sum[i] = *(vf *)(sums[i] + n);
        for (int q = 0; q < STEP; q++) {
            vf b = load(w + q * bytes, bf, n);
            KEEP(b);
            if (fetch) __builtin_prefetch(w + (STEP + q) * bytes + n * size, 0, 2);
            for (int i = 0; i < ROWS; i++) sum[i] += a[i][q] * b;
        }
        for (int i = 0; i < ROWS; i++) *(vf *)(sums[i] + n) = sum[i];
    }
}

// Writes `columns` columns of x [rows, K] . w [K, N] + bias to y [rows, N], rows <= GROUP_TOKENS.
static void multiply_transposed(const float *x, int64_t x_stride, int64_t rows, const char *w, const char *bias,
        int64_t columns, void *y, int64_t outputs, int64_t inputs, int bf) {
    const int64_t bytes = outputs * (bf ? 2 : 4);
    float sums[GROUP_TOKENS + ROWS][MOST_COLUMNS] __attribute__((aligned(64)));
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < columns; n += LANES) *(vf *)&sums[m][n] = bias ? load(bias, bf, n) : splat(0);
    memset(sums[GROUP_TOKENS], 0, ROWS * sizeof(sums[0]));
    for (int64_t k = 0; k < inputs; k += STEP, w += STEP * bytes)
        for (int64_t m = 0; m < rows; m += ROWS) {
            const float *x_rows[ROWS];
            float *y_rows[ROWS];
            for (int i = 0; i < ROWS; i++) {  // beyond the last one it is repeated, and its sums are not used
                x_rows[i] = x + (m + i < rows ? m + i : rows - 1) * x_stride + k;
                y_rows[i] = sums[m + i < rows ? m + i : GROUP_TOKENS + i];
            }
            if (bf) add_products(x_rows, w, bytes, columns, m == 0, y_rows, 1);
            else add_products(x_rows, w, bytes, columns, m == 0, y_rows, 0);
        }
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < columns; n += LANES) store(y, bf, m * outputs + n, *(vf *)&sums[m][n]);
}

// The same with transposed matrices, w [count, K, N], and x of floats.
int grouped_linear_transposed(const float *x, int64_t x_stride, const void *w, const void *bias, const int64_t *groups,
        int64_t count, void *y, int bf, int64_t rows, int64_t outputs, int64_t inputs, int any_rows, int threads) {
    const int64_t size = bf ? 2 : 4;
    int64_t *starts = outputs % LANES || inputs % STEP ? NULL : malloc((rows + 1) * sizeof *starts);
    const int64_t runs = starts ? find_runs(groups, count, rows, outputs * inputs, bf, any_rows, starts) : 0;
    int64_t share = runs * outputs / (4 * threads) / LEAST_COLUMNS * LEAST_COLUMNS;
    share = share < LEAST_COLUMNS ? LEAST_COLUMNS : share > MOST_COLUMNS ? MOST_COLUMNS : share;
    const int64_t shares = (outputs + share - 1) / share;
#pragma omp parallel for schedule(guided, 1) num_threads(threads)
    for (int64_t item = 0; item < runs * shares; item++) {
        const int64_t first = starts[item / shares], n = item % shares * share;
        multiply_transposed(x + first * x_stride, x_stride, starts[item / shares + 1] - first,
                            (const char *)w + (groups[first] * outputs * inputs + n) * size,
                            bias ? (const char *)bias + (groups[first] * outputs + n) * size : NULL,
                            outputs - n < share ? outputs - n : share, (char *)y + (first * outputs + n) * size,
                            outputs, inputs, bf);
    }
    free(starts);
    return runs == 0;
}

#else

int linear(const void *x, int64_t x_stride, const void *w, const void *bias, void *y, int bf, int64_t tokens,
        int64_t outputs, int64_t inputs, int threads) {
    return 1;  // the sums of a tile need 12 registers of 32 bytes at least
}

int grouped_linear(const void *x, int64_t x_stride, const void *w, const void *bias, const int64_t *groups,
        int64_t count, void *y, int bf, int64_t rows, int64_t outputs, int64_t inputs, int any_rows, int threads) {
    return 1;
}

int grouped_linear_transposed(const float *x, int64_t x_stride, const void *w, const void *bias, const int64_t *groups,
        int64_t count, void *y, int bf, int64_t rows, int64_t outputs, int64_t inputs, int any_rows, int threads) {
    return 1;
}

#endif

#ifndef KEEP
#define KEEP(x)
#endif

// Sorts the choices of experts [count], `each` per token in turn, by expert. Choices of one expert keep their order.
// sorted: the experts, rising; tokens: the token of each; places: the place of each choice in that order. Returns 1 if an
// expert is out of range.
int sort_choices(const int64_t *choices, int64_t count, int64_t each, int64_t experts, int64_t *sorted, int64_t *tokens,
        int64_t *places, int threads) {
    for (int64_t i = 0; i < count; i++)
        if (choices[i] < 0 || choices[i] >= experts) return 1;
    int64_t *next = calloc(experts + 1, sizeof *next);
    if (!next) return 1;
    for (int64_t i = 0; i < count; i++) next[choices[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) next[e + 1] += next[e];
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = next[choices[i]]++;
        sorted[place] = choices[i], tokens[place] = i / each, places[i] = place;
    }
    free(next);
    return 0;
}

// y[t] = the sum of weights[t, i] x[places[t, i]] over `each` places, in fp32.
int mix_experts(const void *x, const int64_t *places, const float *weights, void *y, int bf, int64_t tokens,
        int64_t each, int64_t dim, int threads) {
    if (dim % LANES) return 1;
#pragma omp parallel for schedule(static) num_threads(tokens * each * dim > 1 << 16 ? threads : 1)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < dim; d += LANES) {
            vf total = {0};
            for (int64_t i = t * each; i < (t + 1) * each; i++) total += weights[i] * load(x, bf, places[i] * dim + d);
            store(y, bf, t * dim + d, total);
        }
    return 0;
}

// ---- layers with a state per sequence -----------------------------------------------------------------------------
//
// Sequence s has the tokens starts[s] .. starts[s+1]. They go on from its state, states[index[s]], which then is the
// state after its last token. A row of x begins at x + t x_stride.

// Of the numbers of a and b: those at even and odd places of a, then of b; or the first and last halves, interleaved.
#define EVENS(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODDS(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define FIRST(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define LAST(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

#define COLUMNS 64  // of a matrix, which stay in the first-level cache while all tokens of a chunk pass by
#define MAX_KEY 256

// The four numbers of each of WIDE channels, as a vector for each number, and back.
static inline void load_fours(const void *base, int bf, ptrdiff_t at, wf *by_number) {
    wf x[4], pairs[4];
    for (int i = 0; i < 4; i++) x[i] = load_wide(base, bf, at + i * WIDE);
    for (int i = 0; i < 2; i++) pairs[i] = EVENS(x[2 * i], x[2 * i + 1]), pairs[2 + i] = ODDS(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 2; i++) {
        by_number[i] = EVENS(pairs[2 * i], pairs[2 * i + 1]);
        by_number[i + 2] = ODDS(pairs[2 * i], pairs[2 * i + 1]);
    }
}

static inline void store_fours(void *base, int bf, ptrdiff_t at, const wf *by_number) {
    for (int half = 0; half < 2; half++) {
        const wf even = half ? LAST(by_number[0], by_number[2]) : FIRST(by_number[0], by_number[2]);
        const wf odd = half ? LAST(by_number[1], by_number[3]) : FIRST(by_number[1], by_number[3]);
        store_wide(base, bf, at + 2 * half * WIDE, FIRST(even, odd));
        store_wide(base, bf, at + (2 * half + 1) * WIDE, LAST(even, odd));
    }
}

// LANES channels of the convolution below, of which `count` exist, over the tokens of one sequence. last and factor: for
// each of `width` places LANES numbers, WIDE apart.
static inline __attribute__((always_inline)) void convolve(const void *x, int64_t x_stride, float *last,
        const float *factor, const float *shift, void *y, int64_t channels, int64_t channel, int count, int bf,
        int32_t from, int32_t to, const int width, int silu) {
    vf past[WIDE], factors[WIDE];
    for (int j = 0; j < width; j++) {
        past[j] = *(vf *)(last + j * WIDE);
        factors[j] = *(const vf *)(factor + j * WIDE);
    }
    for (int64_t t = from; t < to; t++) {
        vf next = {0}, total = *(const vf *)shift;
        if (count == LANES) next = load(x, bf, t * x_stride + channel);
        else for (int i = 0; i < count; i++) next[i] = load1(x, bf, t * x_stride + channel + i);
        for (int j = 0; j + 1 < width; j++) past[j] = past[j + 1];
        past[width - 1] = next;
        for (int j = 0; j < width; j++) total += past[j] * factors[j];
        if (silu) {
            if (bf) total = rounded(total);
            total /= 1.0f + expv(-total);
        }
        if (count == LANES) store(y, bf, t * channels + channel, total);
        else for (int i = 0; i < count; i++) store1(y, bf, t * channels + channel + i, total[i]);
    }
    for (int j = 0; j < width; j++) *(vf *)(last + j * WIDE) = past[j];
}

// Each channel's last `width` numbers, states [N, C, width], and its new ones, weighed by w [C, width]; then perhaps
// silu. y [T, C] is contiguous.
int short_convolution(const void *x, int64_t x_stride, const void *w, const void *bias, void *states, void *y, int bf,
        int64_t sequences, const int64_t *index, const int32_t *starts, int64_t channels, int width, int silu,
        int threads) {
    if (width < 2 || width > WIDE) return 1;
    const int64_t blocks = (channels + WIDE - 1) / WIDE;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t c = block * WIDE, count = channels - c < WIDE ? channels - c : WIDE;
            const ptrdiff_t state = (index[s] * channels + c) * width;
            wf last[WIDE], factor[WIDE];
            float shift[WIDE] = {0};
            const int by_fours = width == 4 && count == WIDE;
            if (by_fours) {
                load_fours(states, bf, state, last);
                load_fours(w, bf, c * width, factor);
            } else {
                for (int j = 0; j < width; j++) last[j] = factor[j] = (wf){0};
                for (int i = 0; i < count; i++)
                    for (int j = 0; j < width; j++) {
                        last[j][i] = load1(states, bf, state + i * width + j);
                        factor[j][i] = load1(w, bf, (c + i) * width + j);
                    }
            }
            for (int i = 0; bias && i < count; i++) shift[i] = load1(bias, bf, c + i);
            for (int part = 0; part < count; part += LANES) {
                const int here = count - part < LANES ? (int)(count - part) : LANES;
                float *past = (float *)last + part, *factors = (float *)factor + part;
                if (by_fours) convolve(x, x_stride, past, factors, shift + part, y, channels, c + part, LANES, bf,
                                       starts[s], starts[s + 1], 4, silu);
                else convolve(x, x_stride, past, factors, shift + part, y, channels, c + part, here, bf, starts[s],
                              starts[s + 1], width, silu);
            }
            if (by_fours) store_fours(states, bf, state, last);
            for (int i = 0; !by_fours && i < count; i++)
                for (int j = 0; j < width; j++) store1(states, bf, state + i * width + j, last[j][i]);
        }
    return 0;
}

// The gated delta rule (Yang et al. 2024): S = diag(decay) S; S += k (beta (v - S^T k))^T; o = S^T q, with a state
// S [Dk, Dv] per head, decay [T, H, 1 or Dk], beta [T, H], and q and k [T, Hk, Dk], scaled to length 1 if `normed`; q is
// divided by sqrt(Dk). v [T, H, Dv]; out [T, H, Dv] is contiguous. Columns of S do not depend on each other.
int delta_rule(const void *q, int64_t q_stride, const void *k, int64_t k_stride, const void *v, int64_t v_stride,
        int bf, const float *decay, int64_t decay_width, const float *beta, float *states, float *out, int64_t sequences,
        const int64_t *index, const int32_t *starts, int key_heads, int heads, int key_dim, int value_dim, int normed,
        int threads) {
    if (key_dim > MAX_KEY || heads % key_heads) return 1;
    const int parts = (value_dim + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for collapse(3) schedule(dynamic, 1) num_threads(threads)
    for (int64_t s = 0; s < sequences; s++)
        for (int head = 0; head < heads; head++)
            for (int part = 0; part < parts; part++) {
                const int first = part * COLUMNS, count = value_dim - first < COLUMNS ? value_dim - first : COLUMNS;
                float *state = states + ((index[s] * heads + head) * key_dim) * value_dim + first;
                float copy[MAX_KEY * COLUMNS] __attribute__((aligned(64))), keys[MAX_KEY], queries[MAX_KEY];
                // One token needs no copy of the matrix.
                const int in_place = starts[s + 1] - starts[s] == 1 && count == COLUMNS && (uintptr_t)state % 64 == 0 &&
                    value_dim % LANES == 0;
                float *matrix = in_place ? state : copy;
                const ptrdiff_t width = in_place ? value_dim : COLUMNS;
                if (count < COLUMNS) memset(copy, 0, sizeof copy);
                for (int i = 0; !in_place && i < key_dim; i++)
                    memcpy(copy + i * COLUMNS, state + (ptrdiff_t)i * value_dim, count * sizeof(float));
                for (int64_t t = starts[s]; t < starts[s + 1]; t++) {
                    const ptrdiff_t from = head / (heads / key_heads) * key_dim;
                    for (int i = 0; i < key_dim; i++) {
                        keys[i] = load1(k, bf, t * k_stride + from + i);
                        queries[i] = load1(q, bf, t * q_stride + from + i);
                    }
                    const float *decays = decay + (t * heads + head) * decay_width;
                    float k_square = 0, q_square = 0;
                    for (int i = 0; normed && i < key_dim; i++) {
                        k_square += keys[i] * keys[i];
                        q_square += queries[i] * queries[i];
                    }
                    const float k_scale = normed ? 1 / sqrtf(k_square + 1e-6f) : 1;
                    const float q_scale = (normed ? 1 / sqrtf(q_square + 1e-6f) : 1) / sqrtf((float)key_dim);
                    for (int i = 0; i < key_dim; i++) keys[i] *= k_scale, queries[i] *= q_scale;
                    vf change[COLUMNS / LANES], result[COLUMNS / LANES];
                    float given[COLUMNS] __attribute__((aligned(64))) = {0};
                    for (int j = 0; j < count; j++) given[j] = load1(v, bf, t * v_stride + head * value_dim + first + j);
                    for (int j = 0; j < COLUMNS / LANES; j++) change[j] = result[j] = (vf){0};
                    for (int i = 0; i < key_dim; i++) {
                        vf *row = (vf *)(matrix + i * width);
                        const float by = decays[decay_width > 1 ? i : 0];
                        for (int j = 0; j < COLUMNS / LANES; j++) change[j] += keys[i] * (row[j] *= by);
                    }
                    for (int j = 0; j < COLUMNS / LANES; j++)
                        change[j] = (((vf *)given)[j] - change[j]) * beta[t * heads + head];
                    for (int i = 0; i < key_dim; i++) {
                        vf *row = (vf *)(matrix + i * width);
                        for (int j = 0; j < COLUMNS / LANES; j++) result[j] += queries[i] * (row[j] += keys[i] * change[j]);
                    }
                    memcpy(out + (t * heads + head) * value_dim + first, result, count * sizeof(float));
                }
                for (int i = 0; !in_place && i < key_dim; i++)
                    memcpy(state + (ptrdiff_t)i * value_dim, copy + i * COLUMNS, count * sizeof(float));
            }
    return 0;
}

// decay = exp(-exp(a_log) softplus(a + dt_bias)) and beta = sigmoid(b), each f32[T, H], from a and b [T, H]. Rounded to
// bfloat16 where Transformers rounds.
int delta_gates(const void *a, int64_t a_stride, const void *b, int64_t b_stride, const void *a_log, const void *dt_bias,
        float *decay, float *beta, int bf, int64_t tokens, int heads, int threads) {
    for (int64_t t = 0; t < tokens; t++)
        for (int h = 0; h < heads; h++) {
            const float x = load1(a, bf, t * a_stride + h) + load1(dt_bias, bf, h);
            const float step = x > 20 ? x : log1pf(expf(x));
            decay[t * heads + h] = expf(-expf(load1(a_log, bf, h)) * step);
            beta[t * heads + h] = rounded1(1 / (1 + expf(-load1(b, bf, t * b_stride + h))), bf);
        }
    return 0;
}

// y = weight rms_norm(x) silu(gate) for each head: x f32[T, H, D], gate [T, H D], weight [D], y [T, H D].
int gated_rms_norm(const float *x, const void *gate, int64_t gate_stride, const void *weight, void *y, int bf,
        int64_t tokens, int heads, int dim, float eps, int threads) {
    if (dim % LANES || dim > MAX_HEAD) return 1;
#pragma omp parallel for schedule(static) num_threads(tokens * heads * dim > 16384 ? threads : 1)
    for (int64_t row = 0; row < tokens * heads; row++) {
        const ptrdiff_t at = row / heads * gate_stride + row % heads * dim;
        vf values[MAX_HEAD / LANES], squares = {0};
        for (int d = 0; d < dim; d += LANES) {
            const vf value = load(x, 0, row * dim + d);
            values[d / LANES] = bf ? rounded(value) : value;
            squares += values[d / LANES] * values[d / LANES];
        }
        const float inverse = 1.0f / sqrtf(sum(squares) / dim + eps);
        for (int d = 0; d < dim; d += LANES) {
            const vf z = load(gate, bf, at + d);
            vf normed = values[d / LANES] * inverse;
            if (bf) normed = rounded(rounded(normed) * load(weight, bf, d));
            else normed *= load(weight, bf, d);
            store(y, bf, row * dim + d, normed * (z / (1.0f + expv(-z))));
        }
    }
    return 0;
}

#define SCAN_ROWS 4  // of a state, so that their sums stay in registers

// Mamba-2 (Dao and Gu 2024): S = exp(dt A) S + (dt x) B^T; y = S C + D x, with a state S [P, N] per head, x [T, H, P],
// dt [T, H], B and C [T, G, N], and one number of A and of D per head. y [T, H, P] is contiguous.
int selective_scan(const float *x, int64_t x_stride, const float *dt, const float *a, const float *b, int64_t b_stride,
        const float *c, int64_t c_stride, const float *d, float *states, float *y, int64_t sequences,
        const int64_t *index, const int32_t *starts, int heads, int groups, int dim, int state_dim, int threads) {
    if (heads % groups) return 1;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
    for (int64_t s = 0; s < sequences; s++)
        for (int head = 0; head < heads; head++)
            for (int64_t t = starts[s]; t < starts[s + 1]; t++) {
                const float *from = x + t * x_stride + head * dim, step = dt[t * heads + head];
                const float decay = expf(step * a[head]);
                const float *writes = b + t * b_stride + head / (heads / groups) * state_dim;
                const float *reads = c + t * c_stride + head / (heads / groups) * state_dim;
                float *row = states + (index[s] * heads + head) * dim * state_dim;
                int p = 0;
                for (; p + SCAN_ROWS <= dim && state_dim % LANES == 0; p += SCAN_ROWS, row += SCAN_ROWS * state_dim) {
                    vf totals[SCAN_ROWS], written[SCAN_ROWS];
                    for (int i = 0; i < SCAN_ROWS; i++) {
                        totals[i] = (vf){0};
                        written[i] = step * from[p + i] - (vf){0};
                    }
                    for (int n = 0; n < state_dim; n += LANES) {
                        const vf write = *(const vf *)(writes + n), read = *(const vf *)(reads + n);
                        for (int i = 0; i < SCAN_ROWS; i++) {
                            vf *at = (vf *)(row + i * state_dim + n), value = decay * *at + written[i] * write;
                            *at = value;
                            totals[i] += value * read;
                        }
                    }
                    for (int i = 0; i < SCAN_ROWS; i++)
                        y[(t * heads + head) * dim + p + i] = d[head] * from[p + i] + sum(totals[i]);
                }
                for (; p < dim; p++, row += state_dim) {
                    float total = d[head] * from[p];
                    for (int n = 0; n < state_dim; n++) {
                        row[n] = decay * row[n] + step * from[p] * writes[n];
                        total += row[n] * reads[n];
                    }
                    y[(t * heads + head) * dim + p] = total;
                }
            }
    return 0;
}

// ---- low-rank adapters -------------------------------------------------------------------------------------------
//
// y[t, columns of part p] += (x[t] . A_p^T) . B_p^T, with A [parts rank, K] and B [N, rank] of the adapter of row t.
// Rows are put in groups of one adapter, which share a read of A and of B. x . A^T, here `shrunk`, stays float32.

#define GROUP 32  // rows
#define WIDTH 32  // columns of y for which B lies transposed in the first-level cache while a group passes by
#define MAX_RANK 512

typedef struct {
    void *y;
    const void *x, *a, *b;
    int64_t y_stride, x_stride, a_stride, b_stride, inputs;
    int rank, ranks;  // of a part, of all parts
} Adapters;

typedef struct {
    int32_t adapter, count;
    const int32_t *rows;
    float *shrunk;  // [count, ranks]
} Group;

#ifdef __AVX512F__
#define SIDE 4  // a tile is SIDE rows of x by SIDE rows of A, or SIDE rows of y by WIDTH columns
#else
#define SIDE 2
#endif

#ifdef __AVX512F__

static inline void add_lanes(vf acc[SIDE * SIDE], float *sums) { *(vf *)sums = sums_of(acc); }

// to[j][i] = from[i stride + j], in four perfect shuffles.
static inline void transpose(const float *from, ptrdiff_t stride, float (*to)[WIDTH]) {
    wf row[WIDE], mixed[WIDE];
    for (int i = 0; i < WIDE; i++) row[i] = *(const wf *)(from + i * stride);
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < 8; i++) {
            mixed[2 * i] = MERGE(row[i], row[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            mixed[2 * i + 1] = MERGE(row[i], row[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        for (int i = 0; i < WIDE; i++) row[i] = mixed[i];
    }
    for (int j = 0; j < WIDE; j++) *(wf *)to[j] = row[j];
}

#else

static inline void add_lanes(vf acc[SIDE * SIDE], float *sums) {
    for (int i = 0; i < SIDE * SIDE; i++) {
        sums[i] = 0;
        for (int lane = 0; lane < LANES; lane++) sums[i] += acc[i][lane];
    }
}

static inline void transpose(const float *from, ptrdiff_t stride, float (*to)[WIDTH]) {
    for (int i = 0; i < WIDE; i++)
        for (int j = 0; j < WIDE; j++) to[j][i] = from[i * stride + j];
}

#endif

// sums[SIDE i + j] = x[x_at[i] ...] . a[a_at[j] ...]
static inline __attribute__((always_inline)) void dot_tile(const void *x, const ptrdiff_t *x_at, const void *a,
        const ptrdiff_t *a_at, int64_t inputs, const int bf, float *sums) {
    vf acc[SIDE * SIDE];
    for (int i = 0; i < SIDE * SIDE; i++) acc[i] = (vf){0};
    int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        vf left[SIDE];
        for (int i = 0; i < SIDE; i++) {
            left[i] = load(x, bf, x_at[i] + k);
            KEEP(left[i]);
        }
        for (int j = 0; j < SIDE; j++) {
            vf right = load(a, bf, a_at[j] + k);
            KEEP(right);
            for (int i = 0; i < SIDE; i++) acc[SIDE * i + j] += left[i] * right;
        }
    }
    add_lanes(acc, sums);
    for (; k < inputs; k++)
        for (int i = 0; i < SIDE * SIDE; i++)
            sums[i] += load1(x, bf, x_at[i / SIDE] + k) * load1(a, bf, a_at[i % SIDE] + k);
}

// out[i] = left[i] . right, summed over `rank` rows of it.
static inline void mix_tile(const float *const *left, float (*right)[WIDTH], int rank, float (*out)[WIDTH]) {
    vf acc[SIDE][WIDTH / LANES];
    for (int i = 0; i < SIDE; i++)
        for (int c = 0; c < WIDTH / LANES; c++) acc[i][c] = (vf){0};
    for (int r = 0; r < rank; r++)
        for (int c = 0; c < WIDTH / LANES; c++) {
            vf weights = *(vf *)&right[r][c * LANES];
            KEEP(weights);
            for (int i = 0; i < SIDE; i++) acc[i][c] += left[i][r] * weights;
        }
    for (int i = 0; i < SIDE; i++)
        for (int c = 0; c < WIDTH / LANES; c++) *(vf *)&out[i][c * LANES] = acc[i][c];
}

// Sorts the rows that have an adapter into groups; returns how many there are.
static int64_t group_rows(const int32_t *slots, int64_t tokens, int64_t adapters, int ranks, Group *groups,
        float *shrunk, int32_t *order) {
    int64_t count = 0;
    for (int32_t adapter = 0; adapter < adapters; adapter++) {
        int room = 0;
        for (int64_t t = 0; t < tokens; t++) {
            if (slots[t] != adapter) continue;
            if (!room) {
                groups[count++] = (Group){adapter, 0, order, shrunk};
                room = GROUP;
            }
            *order++ = (int32_t)t;
            shrunk += ranks;
            groups[count - 1].count++;
            room--;
        }
    }
    return count;
}

// x . A^T for the rows of a group and the rows of A from `first` on, SIDE of them.
static inline __attribute__((always_inline)) void shrink(const Adapters *l, const Group *group, int first,
        const int bf) {
    const int columns = l->ranks - first < SIDE ? l->ranks - first : SIDE;
    ptrdiff_t x_at[SIDE], a_at[SIDE];  // beyond the last row it is repeated
    for (int j = 0; j < SIDE; j++)
        a_at[j] = group->adapter * l->a_stride + (first + (j < columns ? j : columns - 1)) * l->inputs;
    for (int m = 0; m < group->count; m += SIDE) {
        const int rows = group->count - m < SIDE ? group->count - m : SIDE;
        for (int i = 0; i < SIDE; i++) x_at[i] = group->rows[m + (i < rows ? i : rows - 1)] * l->x_stride;
        float sums[SIDE * SIDE];
        dot_tile(l->x, x_at, l->a, a_at, l->inputs, bf, sums);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < columns; j++) group->shrunk[(m + i) * l->ranks + first + j] = sums[SIDE * i + j];
    }
}

// Adds shrunk . B^T to the rows of a group, in `columns` columns of a part from n on.
static inline __attribute__((always_inline)) void expand(const Adapters *l, const Group *group, int part, int64_t n,
        int columns, const int bf) {
    const int rank = l->rank;
    const ptrdiff_t b_at = group->adapter * l->b_stride + n * rank;
    float straight[WIDTH * MAX_RANK + WIDE] __attribute__((aligned(64)));
    float turned[MAX_RANK][WIDTH] __attribute__((aligned(64)));
    for (int i = 0; i < columns * rank; i++) straight[i] = load1(l->b, bf, b_at + i);
    for (int c = 0; c < columns; c += WIDE)
        for (int r = 0; r < rank; r += WIDE) transpose(&straight[c * rank + r], rank, (float (*)[WIDTH])&turned[r][c]);
    for (int m = 0; m < group->count; m += SIDE) {
        const int rows = group->count - m < SIDE ? group->count - m : SIDE;
        const float *shrunk[SIDE];
        for (int i = 0; i < SIDE; i++)
            shrunk[i] = group->shrunk + (m + (i < rows ? i : rows - 1)) * l->ranks + part * rank;
        float change[SIDE][WIDTH] __attribute__((aligned(64)));
        mix_tile(shrunk, turned, rank, change);
        for (int i = 0; i < rows; i++) {
            const ptrdiff_t at = group->rows[m + i] * l->y_stride + n;
            for (int c = 0; c < columns; c++) store1(l->y, bf, at + c, load1(l->y, bf, at + c) + change[i][c]);
        }
    }
}

// Rows whose slot is negative, or not below `adapters`, stay as they are. Returns 0, or 1 for a rank out of range.
int add_lora(void *y, int64_t y_stride, const void *x, int64_t x_stride, const void *a, int64_t a_stride, const void *b,
        int64_t b_stride, int bf, const int64_t *widths, int parts, int rank, const int32_t *slots, int64_t tokens,
        int64_t adapters, int64_t inputs, int threads) {
    const int ranks = parts * rank;
    if (rank > MAX_RANK) return 1;
    Group *groups = malloc(tokens * (sizeof(Group) + (ranks + 1) * sizeof(float)));
    if (!groups) return 1;
    float *shrunk = (float *)(groups + tokens);
    int32_t *order = (int32_t *)(shrunk + tokens * ranks);
    const int64_t count = group_rows(slots, tokens, adapters, ranks, groups, shrunk, order);
    const Adapters l = {y, x, a, b, y_stride, x_stride, a_stride, b_stride, inputs, rank, ranks};
    int64_t widest = 0;
    for (int p = 0; p < parts; p++) widest = widths[p] > widest ? widths[p] : widest;
#pragma omp parallel num_threads(tokens * inputs * ranks > 65536 ? threads : 1)
    {
#pragma omp for schedule(static) collapse(2)
        for (int64_t g = 0; g < count; g++)
            for (int first = 0; first < ranks; first += SIDE) {
                if (bf) shrink(&l, &groups[g], first, 1);
                else shrink(&l, &groups[g], first, 0);
            }
#pragma omp for schedule(static) collapse(3)
        for (int64_t g = 0; g < count; g++)
            for (int p = 0; p < parts; p++)
                for (int64_t c = 0; c < widest; c += WIDTH) {
                    if (c >= widths[p]) continue;
                    const int columns = widths[p] - c < WIDTH ? (int)(widths[p] - c) : WIDTH;
                    int64_t n = c;
                    for (int before = 0; before < p; before++) n += widths[before];
                    if (bf) expand(&l, &groups[g], p, n, columns, 1);
                    else expand(&l, &groups[g], p, n, columns, 0);
                }
    }
    free(groups);
    return 0;
}

// ---- attention over latents --------------------------------------------------------------------------------------
//
// latents [blocks, BLOCK, D]: a row is the key of all H heads, and its first Dv numbers are their value. queries
// [T, H, D] and out [T, H, Dv] are contiguous; tables, starts and contexts are those of paged_attention.

// `rows` query rows (tokens x heads) of one sequence, from the row `first` on. Row r is token r / H of its chunk.
static inline __attribute__((always_inline)) void attend_latents(const Attention *a, const int rows, int real_rows,
        int64_t first, int64_t first_token, int64_t first_position, const int32_t *table, const int bf) {
    const int D = a->dim, Dv = a->value_dim;
    float query[MAX_ROWS][MAX_LATENT] __attribute__((aligned(64)));
    float acc[MAX_ROWS][MAX_LATENT] __attribute__((aligned(64)));
    float weight[MAX_ROWS][CHUNK] __attribute__((aligned(64)));
    float peak[MAX_ROWS], total[MAX_ROWS];
    int64_t position[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        const int64_t row = first + (r < real_rows ? r : 0);
        position[r] = first_position + row / a->q_heads;
        for (int d = 0; d < D; d += LANES)
            *(vf *)&query[r][d] = load(a->q, bf, (first_token * a->q_heads + row) * D + d) * a->scale;
        memset(acc[r], 0, sizeof(float) * Dv);
        peak[r] = -INFINITY;
        total[r] = 0;
    }
    const int64_t last = position[real_rows - 1];
    int64_t begin = a->window ? position[0] - a->window + 1 : 0;
    begin = begin < 0 ? 0 : begin / BLOCK * BLOCK;
    for (int64_t start = begin; start <= last; start += CHUNK) {
        const int count = last + 1 - start < CHUNK ? (int)(last + 1 - start) : CHUNK;
        for (int b = 0; b < count; b += BLOCK) {
            const ptrdiff_t base = (ptrdiff_t)table[(start + b) / BLOCK] * BLOCK * D;
            for (int t = 0; t < BLOCK; t += SIDE)
                for (int r = 0; r < rows; r += SIDE) {
                    vf products[SIDE * SIDE];
                    float sums[SIDE * SIDE] __attribute__((aligned(64)));
                    for (int i = 0; i < SIDE * SIDE; i++) products[i] = (vf){0};
                    for (int d = 0; d < D; d += LANES) {
                        vf left[SIDE];
                        for (int i = 0; i < SIDE; i++) {
                            left[i] = *(const vf *)&query[r + i][d];
                            KEEP(left[i]);
                        }
                        for (int j = 0; j < SIDE; j++) {
                            vf right = load(a->k, bf, base + (ptrdiff_t)(t + j) * D + d);
                            KEEP(right);
                            for (int i = 0; i < SIDE; i++) products[SIDE * i + j] += left[i] * right;
                        }
                    }
                    add_lanes(products, sums);
                    for (int i = 0; i < SIDE * SIDE; i++) weight[r + i / SIDE][b + t + i % SIDE] = sums[i];
                }
        }
        weigh(a, rows, start, position, weight, peak, total, &acc[0][0], MAX_LATENT);
        for (int b = 0; b < count; b += BLOCK) {
            const ptrdiff_t base = (ptrdiff_t)table[(start + b) / BLOCK] * BLOCK * D;
            const int here = count - b < BLOCK ? count - b : BLOCK;
            for (int d = 0; d < Dv; d += LANES) {
                vf mix[MAX_ROWS];
                for (int r = 0; r < rows; r++) mix[r] = *(vf *)&acc[r][d];
                for (int t = 0; t < here; t++) {
                    const vf value = load(a->k, bf, base + (ptrdiff_t)t * D + d);
                    for (int r = 0; r < rows; r++) mix[r] += weight[r][b + t] * value;
                }
                for (int r = 0; r < rows; r++) *(vf *)&acc[r][d] = mix[r];
            }
        }
    }
    for (int r = 0; r < real_rows; r++)
        for (int d = 0; d < Dv; d += LANES)
            store(a->out, bf, (first_token * a->q_heads + first + r) * Dv + d, *(vf *)&acc[r][d] / total[r]);
}

// Returns 0, or 1 if a size is out of range (nothing is written then).
int latent_attention(const void *q, const void *latents, void *out, int bf, const int32_t *tables,
        int64_t table_stride, const int32_t *starts, const int32_t *contexts, int64_t sequences, int heads, int dim,
        int value_dim, float scale, int window, int threads) {
    if (dim % LANES || value_dim % LANES || dim > MAX_LATENT) return 1;
    const Attention a = {q, latents, latents, out, bf, heads, 1, dim, value_dim, scale, 0, window, NULL};
#pragma omp parallel num_threads(threads)
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t count = starts[s + 1] - starts[s], rows = count * heads;
        const int32_t *table = tables + s * table_stride;
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t first = 0; first < rows; first += MAX_ROWS) {
            const int real = rows - first < MAX_ROWS ? (int)(rows - first) : MAX_ROWS;
            if (bf) attend_latents(&a, MAX_ROWS, real, first, starts[s], contexts[s] - count, table, 1);
            else attend_latents(&a, MAX_ROWS, real, first, starts[s], contexts[s] - count, table, 0);
        }
    }
    return 0;
}

// ---- copies ------------------------------------------------------------------------------------------------------

// Many runs of numbers, each times its own factor: rows of (to, from, count, whether `to` and `from` are bf16).
int copy_scaled(const int64_t *table, const float *factors, int64_t rows, int64_t total, int threads) {
#pragma omp parallel for schedule(dynamic, 8) num_threads(total > 1 << 20 ? threads : 1)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t *row = table + 5 * r, count = row[2];
        void *to = (void *)row[0];
        const void *from = (const void *)row[1];
        const int to_bf = (int)row[3], from_bf = (int)row[4];
        const vf factor = splat(factors[r]);
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(to, to_bf, i, load(from, from_bf, i) * factor);
        for (; i < count; i++) store1(to, to_bf, i, load1(from, from_bf, i) * factors[r]);
    }
    return 0;
}

// ---- normalisation, activation, rotary embedding -----------------------------------------------------------------

static inline __attribute__((always_inline)) void normalise(const float *x, const void *weight, void *y, int bf,
        ptrdiff_t y_at, int64_t dim, float eps, float offset, int cast_first) {
    vf squares = {0};
    for (int64_t d = 0; d < dim; d += LANES) squares += *(const vf *)(x + d) * *(const vf *)(x + d);
    const float inverse = 1.0f / sqrtf(sum(squares) / dim + eps);
    for (int64_t d = 0; d < dim; d += LANES) {
        vf normed = *(const vf *)(x + d) * inverse;
        if (cast_first && bf) normed = rounded(normed);
        store(y, bf, y_at + d, normed * (load(weight, bf, d) + offset));
    }
}

// y = rms_norm(x [+ residual]); with a residual their sum, rounded, is written to `summed`.
int rms_norm(const void *x, int64_t x_stride, const void *residual, int64_t residual_stride, void *summed,
        const void *weight, void *y, int bf, int64_t tokens, int64_t dim, float eps, float offset, int cast_first,
        int threads) {
    if (dim % LANES || dim > MAX_HIDDEN) return 1;
#pragma omp parallel for schedule(static) num_threads(tokens * dim > 16384 ? threads : 1)
    for (int64_t t = 0; t < tokens; t++) {
        float row[MAX_HIDDEN] __attribute__((aligned(64)));
        for (int64_t d = 0; d < dim; d += LANES) {
            vf value = load(x, bf, t * x_stride + d);
            if (residual) {
                value += load(residual, bf, t * residual_stride + d);
                if (bf) value = rounded(value);
                store(summed, bf, t * dim + d, value);
            }
            *(vf *)&row[d] = value;
        }
        normalise(row, weight, y, bf, t * dim, dim, eps, offset, cast_first);
    }
    return 0;
}

// out = act(gate) * up, the activation rounded before the product. x [T, 2 dim], kind 0: silu, 1: gelu (tanh).
int gated_activation(const void *x, int64_t stride, void *out, int bf, int64_t tokens, int64_t dim, int kind,
        int threads) {
    if (dim % LANES) return 1;
#pragma omp parallel for schedule(static) num_threads(tokens * dim > 8192 ? threads : 1)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < dim; d += LANES) {
            const vf gate = load(x, bf, t * stride + d), up = load(x, bf, t * stride + dim + d);
            // gelu_tanh(x) = x * sigmoid(2 u), since (1 + tanh u) / 2 = sigmoid(2 u)
            vf z = gate;
            if (kind) z = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
            vf act = gate / (1.0f + expv(-z));
            if (bf) act = rounded(act);
            store(out, bf, t * dim + d, act * up);
        }
    return 0;
}

// out = gate sigmoid(alpha gate) (up + 1) with gate <= limit and |up| <= limit. x [T, 2 dim]: gates at even places.
int clamped_gate(const void *x, int64_t stride, void *out, int bf, int64_t tokens, int64_t dim, float alpha,
        float limit, int threads) {
    if (dim % WIDE) return 1;
#pragma omp parallel for schedule(static) num_threads(tokens * dim > 8192 ? threads : 1)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < dim; d += WIDE) {
            const wf first = load_wide(x, bf, t * stride + 2 * d), second = load_wide(x, bf, t * stride + 2 * d + WIDE);
            const wf gates = EVENS(first, second), ups = ODDS(first, second);
            for (int part = 0; part < WIDE; part += LANES) {
                vf gate = ((const vf *)&gates)[part / LANES], up = ((const vf *)&ups)[part / LANES];
                gate = blend((vi)(gate > limit), splat(limit), gate);
                up = blend((vi)(up > limit), splat(limit), blend((vi)(up < -limit), splat(-limit), up));
                store(out, bf, t * dim + d + part, gate / (1.0f + expv(-alpha * gate)) * (up + 1.0f));
            }
        }
    return 0;
}

// Per-head norm (optional), rotation of the first `rotary` dims, keys and values written to their places in the cache.
// qkv [T, (Hq + 2 Hk) D] -> q [T, Hq, D]; caches as for paged_attention with Dv = D. cos, sin f32[P, rotary].
int rope_and_cache(const void *qkv, int64_t stride, void *q, int bf, void *keys, void *values, const float *cosines,
        const float *sines, int rotary, const int64_t *positions, const int64_t *cache_index, int64_t tokens,
        int q_heads, int kv_heads, int dim, const void *q_norm, const void *k_norm, float eps, float offset,
        int cast_first, int threads) {
    if (dim % LANES || dim > MAX_HEAD || rotary % 2) return 1;
#pragma omp parallel for schedule(static) num_threads(tokens * stride > 8192 ? threads : 1)
    for (int64_t t = 0; t < tokens; t++) {
        const float *cosine = cosines + positions[t] * rotary, *sine = sines + positions[t] * rotary;
        const int64_t place = cache_index[t], block = place / BLOCK, at = place % BLOCK;
        float row[MAX_HEAD] __attribute__((aligned(64))), turned[MAX_HEAD] __attribute__((aligned(64)));
        // A key goes to one line of the cache per dimension: they are fetched while the queries are computed.
        const int64_t key_bytes = (int64_t)kv_heads * dim * BLOCK * (bf ? 2 : 4);
        const int64_t share = place < 0 ? 0 : (key_bytes / 64 + q_heads - 1) / q_heads;
        const char *line = (const char *)keys + block * key_bytes;
        for (int h = 0; h < q_heads + kv_heads; h++) {
            const int is_key = h >= q_heads;
            for (int64_t i = 0; !is_key && i < share; i++, line += 64) __builtin_prefetch(line, 1);
            const void *norm = is_key ? k_norm : q_norm;
            const ptrdiff_t from = t * stride + (ptrdiff_t)h * dim;
            for (int d = 0; d < dim; d += LANES) *(vf *)&row[d] = load(qkv, bf, from + d);
            if (norm) {
                if (bf) {
                    bf16 normed[MAX_HEAD];
                    normalise(row, norm, normed, 1, 0, dim, eps, offset, cast_first);
                    for (int d = 0; d < dim; d += LANES) *(vf *)&row[d] = load(normed, 1, d);
                } else {
                    normalise(row, norm, row, 0, 0, dim, eps, offset, cast_first);
                }
            }
            const int half = rotary / 2;
            int at_dim = 0;
            for (; at_dim + LANES <= half; at_dim += LANES) {
                const int d = at_dim;
                vf c1 = *(const vf *)(cosine + d), s1 = *(const vf *)(sine + d);
                vf c2 = *(const vf *)(cosine + half + d), s2 = *(const vf *)(sine + half + d);
                if (bf) { c1 = rounded(c1); s1 = rounded(s1); c2 = rounded(c2); s2 = rounded(s2); }
                const vf x1 = *(vf *)&row[d], x2 = *(vf *)&row[half + d];
                *(vf *)&turned[d] = x1 * c1 - x2 * s1;
                *(vf *)&turned[half + d] = x2 * c2 + x1 * s2;
            }
            for (int d = at_dim; d < half; d++) {
                turned[d] = row[d] * rounded1(cosine[d], bf) - row[half + d] * rounded1(sine[d], bf);
                turned[half + d] =
                    row[half + d] * rounded1(cosine[half + d], bf) + row[d] * rounded1(sine[half + d], bf);
            }
            memcpy(&turned[rotary], &row[rotary], sizeof(float) * (dim - rotary));
            if (!is_key) {
                for (int d = 0; d < dim; d += LANES)
                    store(q, bf, (t * q_heads + h) * (ptrdiff_t)dim + d, *(vf *)&turned[d]);
            } else if (place >= 0) {
                const ptrdiff_t head = block * kv_heads + (h - q_heads);
                for (int d = 0; d < dim; d++) store1(keys, bf, (head * dim + d) * BLOCK + at, turned[d]);
                const ptrdiff_t value = t * stride + (ptrdiff_t)(kv_heads + h) * dim;
                for (int d = 0; d < dim; d += LANES)
                    store(values, bf, (head * BLOCK + at) * dim + d, load(qkv, bf, value + d));
            }
        }
    }
    return 0;
}

// ---- sampling ----------------------------------------------------------------------------------------------------
//
// One token per row by inverting the cumulative distribution of softmax(z / temperature) at uniforms[m]; temperature 0
// takes the largest logit. Each block of logits is reduced to its peak and mass while it is in the cache; only the
// block that is drawn is read again.

static void block_stats(const void *z, int bf, ptrdiff_t at, int count, float inverse, float *peak, float *mass,
        float *moment) {
    vf top = splat(-INFINITY);
    vi bad = {0};
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vf x = load(z, bf, at + i);
        bad |= (vi)(x != x);
        top = maxv(x, top);
    }
    float high = max1(top);
    int nan = 0;
    for (int lane = 0; lane < LANES; lane++) nan |= bad[lane];
    for (; i < count; i++) {
        const float x = load1(z, bf, at + i);
        nan |= x != x;
        high = x > high ? x : high;
    }
    *peak = nan ? NAN : high;
    *mass = *moment = 0;
    if (nan || high == -INFINITY) return;
    vf total = {0}, weighted = {0};
    for (i = 0; i + LANES <= count; i += LANES) {
        const vf y = (load(z, bf, at + i) - high) * inverse, w = expv(y);
        total += w;
        weighted += blend((vi)(w > 0), w * y, splat(0));
    }
    *mass = sum(total);
    *moment = sum(weighted);
    for (; i < count; i++) {
        const float y = (load1(z, bf, at + i) - high) * inverse;
        const float w = y < -87 ? 0 : expf(y);
        *mass += w;
        if (w > 0) *moment += w * y;
    }
}

int draw(const void *logits, int64_t stride, int bf, int64_t rows, int64_t vocabulary, const float *temperatures,
        const float *uniforms, int64_t *tokens, float *logprobs, float *entropies, int threads) {
    const int64_t blocks = (vocabulary + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
    if (blocks > 4096) return 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(rows * vocabulary > 8192 ? threads : 1)
    for (int64_t m = 0; m < rows; m++) {
        float peaks[4096], masses[4096], moments[4096];
        const int greedy = temperatures[m] == 0;
        const float inverse = greedy ? 1.0f : 1.0f / temperatures[m];
        const ptrdiff_t row = m * stride;
        float peak = -INFINITY;
        int nan = 0;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t left = vocabulary - b * SAMPLE_BLOCK;
            block_stats(logits, bf, row + b * SAMPLE_BLOCK, left < SAMPLE_BLOCK ? (int)left : SAMPLE_BLOCK, inverse,
                        &peaks[b], &masses[b], &moments[b]);
            nan |= peaks[b] != peaks[b];
            peak = peaks[b] > peak ? peaks[b] : peak;
        }
        if (nan || peak == -INFINITY || peak == INFINITY) {
            tokens[m] = 0;
            logprobs[m] = NAN;
            if (entropies) entropies[m] = NAN;
            continue;
        }
        float total = 0, moment = 0;
        for (int64_t b = 0; b < blocks; b++) {
            const float shift = (peaks[b] - peak) * inverse, shrink = shift < -87 ? 0 : expf(shift);
            if (shrink > 0) moment += shrink * (moments[b] + masses[b] * shift);
            masses[b] *= shrink;
            total += masses[b];
        }
        int64_t token = -1;
        if (greedy) {
            for (int64_t v = 0; token < 0; v++)
                if (load1(logits, bf, row + v) == peak) token = v;
        } else {
            float target = uniforms[m] * total;
            target = target < total ? target : nextafterf(total, 0);
            float before = 0;
            int64_t b = 0, last = 0;
            for (; b < blocks; b++) {
                if (masses[b] > 0) last = b;
                if (before + masses[b] > target) break;
                before += masses[b];
            }
            if (b == blocks) {  // rounding left none
                b = last;
                before = INFINITY;
            }
            const int64_t end = (b + 1) * SAMPLE_BLOCK < vocabulary ? (b + 1) * SAMPLE_BLOCK : vocabulary;
            float reached = before == INFINITY ? -INFINITY : before;
            for (int64_t v = b * SAMPLE_BLOCK; v < end && !(reached > target); v += LANES) {
                float weights[LANES] __attribute__((aligned(64)));
                const int here = end - v < LANES ? (int)(end - v) : LANES;
                if (here == LANES) {
                    *(vf *)weights = expv((load(logits, bf, row + v) - peak) * inverse);
                } else {
                    for (int i = 0; i < here; i++) {
                        const float y = (load1(logits, bf, row + v + i) - peak) * inverse;
                        weights[i] = y < -87 ? 0 : expf(y);
                    }
                }
                for (int i = 0; i < here && !(reached > target); i++) {
                    reached += weights[i];
                    if (weights[i] > 0) token = v + i;  // the last of weight, if rounding leaves none
                }
            }
        }
        tokens[m] = token;
        logprobs[m] = (load1(logits, bf, row + token) - peak) * inverse - logf(total);
        if (entropies) entropies[m] = logf(total) - moment / total;
    }
    return 0;
}

// The blocks table[s, firsts[s] … (contexts[s] - 1) / block_size] of each sequence as flat = indptr[count + 1],
// last_page_len[count], blocks.
int list_pages(const int32_t *table, int64_t width, const int32_t *contexts, const int32_t *firsts, int64_t count,
               int block_size, int32_t *flat) {
    int32_t *filled = flat + count + 1, *blocks = filled + count, listed = 0;
    flat[0] = 0;
    for (int64_t s = 0; s < count; s++) {
        const int32_t last = (contexts[s] - 1) / block_size, first = firsts ? firsts[s] : 0;
        if (contexts[s] < 1 || first < 0 || first > last || last >= width) return 1;
        memcpy(blocks + listed, table + s * width + first, (size_t)(last - first + 1) * sizeof *table);
        listed += last - first + 1;
        flat[s + 1] = listed;
        filled[s] = (contexts[s] - 1) % block_size + 1;
    }
    return 0;
}
