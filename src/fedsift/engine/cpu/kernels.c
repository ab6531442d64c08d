/* Neural network layers on tensors stored as (H, C, W, N), with the batch N innermost.
 *
 * The samples of a pixel are adjacent in memory. A few output channels of a few samples therefore
 * stay in registers during the loop over the kernel's taps, and each tap is one multiply-add of
 * full vectors.
 *
 * The functions check no bounds: kernel_support.py selects their inputs.
 */

#include <math.h>
#include <stddef.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, MAX_OUTPUTS = 10, MAX_SIDE = 5 };
#elif defined(__AVX2__)
enum { LANES = 8, MAX_OUTPUTS = 5, MAX_SIDE = 3 };
#else
enum { LANES = 4, MAX_OUTPUTS = 10, MAX_SIDE = 5 };
#endif
/* LANES: floats per vector. MAX_OUTPUTS: output channels whose sums (two vectors each) fit into the
   registers. MAX_SIDE: side of the largest square of sums (one vector each) that fits. */

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int ints __attribute__((vector_size(4 * LANES)));
typedef unsigned char bytes __attribute__((vector_size(LANES)));
typedef ptrdiff_t isize;
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

INLINE isize max_of(isize a, isize b) { return a > b ? a : b; }
INLINE isize min_of(isize a, isize b) { return a < b ? a : b; }

INLINE vector load(const float *from) {
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vector v) { memcpy(to, &v, sizeof v); }

/* ---- y = bias + x * weight ------------------------------------------------------------------ */

typedef struct {
    isize rows, columns, in;              /* the input's rows, columns and channels */
    isize kh, kw, out;              /* the kernel's rows and columns, and the output channels */
    isize pad_rows, pad_columns, batch;
} Layer;

typedef struct { isize from, to; } Range;

/* The kernel's taps that lie inside the input, for the output at `at`. */
INLINE Range inside(isize at, isize pad, isize taps, isize size) {
    return (Range){max_of(0, pad - at), min_of(taps, size + pad - at)};
}

/* Compute one output pixel: `outs` channels of `wide` vectors of samples. */
INLINE void tile(int outs, int wide, const Layer *s, const float *x, const float *weight, const float *bias, float *y,
                 isize step, Range down, Range over) {
    isize plane = s->columns * s->batch, row = s->in * plane;
    vector sum[10][2];
    UNROLLED(o, outs) UNROLLED(v, wide) sum[o][v] = (vector){} + bias[o];
    for (isize i = down.from; i < down.to; i++)
        for (isize j = over.from; j < over.to; j++) {
            const float *pixel = x + i * row + j * s->batch, *w = weight + (i * s->kw + j) * s->in * s->out;
            for (isize c = 0; c < s->in; c++, pixel += plane, w += s->out) {
                vector value[2];
                UNROLLED(v, wide) value[v] = load(pixel + v * LANES);
                UNROLLED(o, outs) UNROLLED(v, wide) sum[o][v] += w[o] * value[v];
            }
        }
    UNROLLED(o, outs) UNROLLED(v, wide) store(y + o * step + v * LANES, sum[o][v]);
}

/* The number of channels in the next tile, out of those that are left. */
INLINE int tile_outputs(isize left) {
    left = min_of(left, MAX_OUTPUTS);
    return left >= 10 ? 10 : left >= 8 ? 8 : left >= 5 ? 5 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* Compute `outs` channels of one output pixel for all samples. The last tile may overlap the one before it. */
static void pixel(int outs, const Layer *s, const float *x, const float *weight, const float *bias, float *y,
                  isize step, Range down, Range over) {
    int wide = s->batch >= 2 * LANES ? 2 : 1;
    for (isize n = 0, at; n < s->batch; n = at + wide * LANES) {
        at = min_of(n, s->batch - wide * LANES);
#define TILE(outs, wide) \
    case 16 * wide + outs: \
        tile(outs, wide, s, x + at, weight, bias, y + at, step, down, over); \
        break;
        switch (16 * wide + outs) {
            TILE(10, 2) TILE(8, 2) TILE(5, 2) TILE(4, 2) TILE(2, 2) TILE(1, 2)
            TILE(10, 1) TILE(8, 1) TILE(5, 1) TILE(4, 1) TILE(2, 1) TILE(1, 1)
        }
    }
}

/* y (H', O, W', N) = bias + x (H, C, W, N), padded with zeros, * weight (KH, KW, C, O). */
void convolve(const float *x, const float *weight, const float *bias, float *y, isize rows, isize columns, isize in,
              isize kh, isize kw, isize out, isize pad_rows, isize pad_columns, isize batch) {
    Layer s = {rows, columns, in, kh, kw, out, pad_rows, pad_columns, batch};
    isize out_rows = rows + 2 * pad_rows - kh + 1, out_columns = columns + 2 * pad_columns - kw + 1;
    isize step = out_columns * batch;
    for (isize h = 0; h < out_rows; h++) {
        Range down = inside(h, pad_rows, kh, rows);
        for (isize o = 0, outs; o < out; o += outs) {
            outs = tile_outputs(out - o);
            for (isize w = 0; w < out_columns; w++) {
                Range over = inside(w, pad_columns, kw, columns);
                const float *from = x + ((h - pad_rows) * in * columns + w - pad_columns) * batch;
                pixel(outs, &s, from, weight + o, bias + o, y + (h * out + o) * step + w * batch, step, down, over);
            }
        }
    }
}

/* ---- the gradient of weight ----------------------------------------------------------------- */

/* For `os` channels and `ts` taps: add the sum of gradient * x over the pixels and samples of some rows. */
INLINE void dots(int os, int ts, const float *g, const float *x, const isize *taps, isize rows, isize length,
                 isize out, isize in_row, float *to, isize stride) {
    vector sum[5][5];
    float rest[5][5] = {};
    UNROLLED(o, os) UNROLLED(t, ts) sum[o][t] = (vector){};
    for (isize row = 0; row < rows; row++, g += out * length, x += in_row) {
        isize p = 0;
        for (; p + LANES <= length; p += LANES) {
            vector value[5];
            UNROLLED(t, ts) value[t] = load(x + taps[t] + p);
            UNROLLED(o, os) {
                vector gradient = load(g + o * length + p);
                UNROLLED(t, ts) sum[o][t] += gradient * value[t];
            }
        }
        for (; p < length; p++)
            for (int o = 0; o < os; o++)
                for (int t = 0; t < ts; t++) rest[o][t] += g[o * length + p] * x[taps[t] + p];
    }
    for (int o = 0; o < os; o++)
        for (int t = 0; t < ts; t++) {
            float total = rest[o][t];
            for (int lane = 0; lane < LANES; lane++) total += sum[o][t][lane];
            to[o * stride + t] += total;
        }
}

/* The number of channels or taps in the next square, out of those that are left. */
INLINE int square_side(isize left) {
    left = min_of(left, MAX_SIDE);
    return left >= 5 ? 5 : left >= 3 ? 3 : 1;
}

/* to (O, taps) += the gradient of the weights, given g (H', O, W', N) and the offsets of the taps in x. */
void weight_gradient(const float *g, const float *x, const isize *taps, float *to, isize count, isize rows,
                     isize columns, isize in_row, isize out, isize batch) {
    isize length = columns * batch, together = max_of(1, 2048 / length); /* rows that fit into the cache */
    for (isize row = 0, now; row < rows; row += now) {
        now = min_of(together, rows - row);
        const float *from_x = x + row * in_row;
        for (isize t = 0, ts; t < count; t += ts) {
            ts = square_side(count - t);
            for (isize o = 0, os; o < out; o += os) {
                os = square_side(out - o);
                const float *from = g + (row * out + o) * length;
#define DOTS(os, ts) \
    case 8 * os + ts: \
        dots(os, ts, from, from_x, taps + t, now, length, out, in_row, to + o * count + t, count); \
        break;
                switch (8 * os + ts) {
                    DOTS(5, 5) DOTS(5, 3) DOTS(5, 1)
                    DOTS(3, 5) DOTS(3, 3) DOTS(3, 1)
                    DOTS(1, 5) DOTS(1, 3) DOTS(1, 1)
                }
            }
        }
    }
}

/* ---- pooling --------------------------------------------------------------------------------- */

/* The elements of a vector where the mask is set, 0 elsewhere. */
INLINE vector where(ints mask, vector v) { return (vector)(mask & (ints)v); }

/* Set `most` to the elementwise maximum of two vectors, and return where it is the second. NaN is the largest. */
INLINE ints keep_larger(vector *most, vector other) {
    ints is_other = (other > *most) | (other != other);
    *most = (vector)((is_other & (ints)other) | (~is_other & (ints)*most));
    return is_other;
}

/* y (H/2, C, W/2, N) = the maximum of each 2 x 2 square; argmax = the index of its first occurrence in the square.
   With `relu`, y is 0 and argmax is NONE where no pixel is positive. */
enum { NONE = 4 };
void max_pool(const float *x, float *y, unsigned char *argmax, isize rows, isize channels, isize columns, isize batch,
           isize relu) {
    isize plane = columns * batch, out = columns / 2;
    for (isize h = 0; h < rows / 2; h++)
        for (isize c = 0; c < channels; c++)
            for (isize w = 0; w < out; w++) {
                const float *upper = x + (2 * h * channels + c) * plane + 2 * w * batch;
                const float *lower = upper + channels * plane;
                isize to = ((h * channels + c) * out + w) * batch;
                for (isize n = 0, at; n < batch; n = at + LANES) {
                    at = min_of(n, batch - LANES);
                    vector most = load(upper + at);
                    ints right = keep_larger(&most, load(upper + batch + at));
                    ints left_below = keep_larger(&most, load(lower + at));
                    ints right_below = keep_larger(&most, load(lower + batch + at));
                    ints first = (right_below & 3) | (~right_below & ((left_below & 2) | (~left_below & right & 1)));
                    if (relu) {
                        ints none = most <= 0;
                        most = where(~none, most);
                        first = (none & NONE) | (~none & first);
                    }
                    bytes code = __builtin_convertvector(first, bytes);
                    store(y + to + at, most);
                    memcpy(argmax + to + at, &code, sizeof code);
                }
            }
}

/* The gradient of the input of `max_pool`: each number goes to the pixel of the maximum. */
void max_pool_gradient(const float *g, const unsigned char *argmax, float *x, isize rows, isize channels,
                       isize columns, isize batch) {
    isize plane = columns * batch, out = columns / 2;
    for (isize h = 0; h < rows / 2; h++)
        for (isize c = 0; c < channels; c++)
            for (isize w = 0; w < out; w++) {
                float *upper = x + (2 * h * channels + c) * plane + 2 * w * batch, *lower = upper + channels * plane;
                isize from = ((h * channels + c) * out + w) * batch;
                for (isize n = 0, at; n < batch; n = at + LANES) {
                    at = min_of(n, batch - LANES);
                    bytes code;
                    memcpy(&code, argmax + from + at, sizeof code);
                    ints first = __builtin_convertvector(code, ints);
                    vector gradient = load(g + from + at);
                    store(upper + at, where(first == 0, gradient));
                    store(upper + batch + at, where(first == 1, gradient));
                    store(lower + at, where(first == 2, gradient));
                    store(lower + batch + at, where(first == 3, gradient));
                }
            }
}

/* to (C) = the sum of g (H, C, W, N) where argmax is not NONE. */
void bias_gradient(const float *g, const unsigned char *argmax, float *to, isize rows, isize channels, isize columns,
                   isize batch) {
    isize plane = columns * batch;
    for (isize c = 0; c < channels; c++) {
        vector sum = {};
        float rest = 0;
        for (isize h = 0; h < rows; h++) {
            isize from = (h * channels + c) * plane, p = 0;
            for (; p + LANES <= plane; p += LANES) {
                bytes code;
                memcpy(&code, argmax + from + p, sizeof code);
                sum += where(__builtin_convertvector(code, ints) != NONE, load(g + from + p));
            }
            for (; p < plane; p++) rest += argmax[from + p] == NONE ? 0 : g[from + p];
        }
        for (int lane = 0; lane < LANES; lane++) rest += sum[lane];
        to[c] = rest;
    }
}

/* ---- convolution and pooling at once ---------------------------------------------------------- */

/* `convolve` and `max_pool`, two rows at a time. The rows `between` them, (2, O, W', N), stay in the cache. */
void convolve_pool(const float *x, const float *weight, const float *bias, float *between, float *y,
                    unsigned char *argmax, isize rows, isize columns, isize in, isize kh, isize kw, isize out,
                    isize batch, isize relu) {
    isize out_columns = columns - kw + 1, line = out * (out_columns / 2) * batch;
    for (isize h = 0; h + kh < rows; h += 2, y += line, argmax += line) {
        convolve(x + h * in * columns * batch, weight, bias, between, kh + 1, columns, in, kh, kw, out, 0, 0,
                 batch);
        max_pool(between, y, argmax, 2, out, out_columns, batch, relu);
    }
}

/* `max_pool_gradient` and `weight_gradient`, two rows at a time. An odd last column of `between` must be zero. */
void pool_weight_gradient(const float *g, const unsigned char *argmax, const float *x, const isize *taps,
                           float *between, float *to, isize count, isize rows, isize columns, isize in_row, isize out,
                           isize batch) {
    isize line = out * (columns / 2) * batch;
    for (isize h = 0; h + 1 < rows; h += 2, g += line, argmax += line) {
        max_pool_gradient(g, argmax, between, 2, out, columns, batch);
        weight_gradient(between, x + h * in_row, taps, to, count, 2, columns, in_row, out, batch);
    }
}

/* ---- Winograd: evaluation at points and interpolation ---------------------------------------- */

enum { MAX_POINTS = 8 }; /* the largest number of points */
typedef struct { isize item, tile, plane; } Steps; /* strides in memory */

/* For each tile of each plane: `out` items of y = matrix (out, in) times `in` items of x. Tiles of y start `apart`
   items after each other. Where they overlap they are added: `sums` still holds the values of the previous tile. */
INLINE void mix(int in, const float *x, Steps of_x, const float *matrix, float *y, Steps of_y, isize out, isize apart,
                isize planes, isize tiles, isize batch) {
    for (isize plane = 0; plane < planes; plane++)
        for (isize n = 0, at; n < batch; n = at + LANES) {
            at = min_of(n, batch - LANES);
            vector sums[2 * MAX_POINTS] = {};
            for (isize tile = 0; tile < tiles; tile++) {
                const float *from = x + plane * of_x.plane + tile * of_x.tile + at;
                float *to = y + plane * of_y.plane + tile * of_y.tile + at;
                vector item[MAX_POINTS];
                UNROLLED(i, in) item[i] = load(from + i * of_x.item);
                for (isize o = 0; o < out; o++) {
                    vector sum = sums[o + apart];
                    UNROLLED(i, in) sum += matrix[o * in + i] * item[i];
                    store(to + o * of_y.item, sum);
                    sums[o] = sum;
                }
            }
        }
}

#define MIX(in) \
    case in: \
        mix(in, x, of_x, matrix, y, of_y, out, apart, planes, tiles, batch); \
        break;

/* y (points, planes, tiles, N) = matrix (points, wide) times `wide` columns of x (planes, columns, N). A tile starts
   at every `step`-th column. */
void to_points(const float *x, const float *matrix, float *y, isize planes, isize columns, isize tiles, isize wide,
               isize step, isize points, isize batch) {
    Steps of_x = {batch, step * batch, columns * batch}, of_y = {planes * tiles * batch, batch, tiles * batch};
    isize out = points, apart = MAX_POINTS;
    switch (wide) { MIX(2) MIX(4) MIX(6) MIX(8) }
}

/* y (planes, columns, N) = matrix (wide, points) times the points of x (points, planes, tiles, N). A tile of `wide`
   columns starts at every `step`-th column. */
void from_points(const float *x, const float *matrix, float *y, isize planes, isize columns, isize tiles, isize wide,
                 isize step, isize points, isize batch) {
    Steps of_x = {planes * tiles * batch, batch, tiles * batch}, of_y = {batch, step * batch, columns * batch};
    isize out = wide, apart = step;
    switch (points) { MIX(4) MIX(6) MIX(8) }
}

/* ---- input and loss of a network --------------------------------------------------------- */

/* to (H, C, W, N) = the chosen images of x (.., C, H, W). A few images are copied at
   a time, and each is read sequentially, which is fastest. */
void gather(const float *x, const isize *chosen, float *to, isize rows, isize channels, isize columns, isize batch) {
    for (isize first = 0; first < batch; first += 16)
        for (isize h = 0; h < rows; h++)
            for (isize c = 0; c < channels; c++) {
                float *plane = to + (h * channels + c) * columns * batch;
                for (isize n = first; n < min_of(first + 16, batch); n++) {
                    const float *from = x + ((chosen[n] * channels + c) * rows + h) * columns;
                    for (isize w = 0; w < columns; w++) plane[w * batch + n] = from[w];
                }
            }
}

/* The mean cross-entropy of x (classes, N) with the chosen labels, and its gradient g. A loss of -1 means that one
   of the labels is not a class. */
void cross_entropy(const float *x, const isize *labels, const isize *chosen, float *g, float *loss, isize classes,
                   isize batch) {
    double total = 0;
    for (isize n = 0; n < batch; n++) {
        isize label = labels[chosen[n]];
        if (label < 0 || label >= classes) {
            *loss = -1;
            return;
        }
        float most = x[n], sum = 0;
        for (isize c = 1; c < classes; c++) most = fmaxf(most, x[c * batch + n]);
        for (isize c = 0; c < classes; c++) sum += g[c * batch + n] = expf(x[c * batch + n] - most);
        for (isize c = 0; c < classes; c++) g[c * batch + n] = (g[c * batch + n] / sum - (c == label)) / batch;
        total += logf(sum) + most - x[label * batch + n];
    }
    *loss = total / batch;
}

/* ---- the local step -------------------------------------------------------------------------- */

/* Equations (4), (5) and (3): m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, w -= lr m / sqrt(v + eps). */
void adam(float *restrict w, float *restrict m, float *restrict v, const float *restrict g, double lr, double beta1,
          double beta2, double eps, isize d) {
    float rate = lr, keep_m = beta1, new_m = 1 - beta1, keep_v = beta2, new_v = 1 - beta2, small = eps;
    for (isize i = 0; i < d; i++) {
        m[i] = keep_m * m[i] + new_m * g[i];
        v[i] = keep_v * v[i] + new_v * g[i] * g[i];
        w[i] -= rate * (m[i] / sqrtf(v[i] + small));
    }
}
