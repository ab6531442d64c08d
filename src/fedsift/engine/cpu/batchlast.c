/* Neural networks with the batch innermost: tensors are (H, C, W, N) in memory.
 *
 * All samples of a pixel lie side by side. So a few channels of some samples stay in registers
 * while the taps of the kernel go by, and each tap is one multiply-add of whole vectors.
 */

#include <math.h>
#include <stddef.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, DEEPEST = 10, SIDE = 5 };
#elif defined(__AVX2__)
enum { LANES = 8, DEEPEST = 5, SIDE = 3 };
#else
enum { LANES = 4, DEEPEST = 10, SIDE = 5 };
#endif
/* Floats of a vector; channels for which two vectors each fit into the registers; and how many by
   how many vectors do. */

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int numbers __attribute__((vector_size(4 * LANES)));
typedef unsigned char bytes __attribute__((vector_size(LANES)));
typedef ptrdiff_t whole;
#define INLINE static inline __attribute__((always_inline))
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

INLINE whole larger(whole a, whole b) { return a > b ? a : b; }
INLINE whole smaller(whole a, whole b) { return a < b ? a : b; }

INLINE vector load(const float *from) {
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vector v) { memcpy(to, &v, sizeof v); }

/* ---- y = bias + x * weight ------------------------------------------------------------------ */

typedef struct {
    whole rows, columns, in;              /* of x */
    whole high, across, out;              /* of the kernel */
    whole pad_rows, pad_columns, batch;
} Layer;

typedef struct { whole from, to; } Range;

/* The taps that meet a pixel, for an output at `at`. */
INLINE Range inside(whole at, whole pad, whole taps, whole size) {
    return (Range){larger(0, pad - at), smaller(taps, size + pad - at)};
}

/* One pixel of the output: `deep` of its channels for `wide` vectors of samples. */
INLINE void tile(int deep, int wide, const Layer *s, const float *x, const float *weight, const float *bias, float *y,
                 whole step, Range down, Range over) {
    whole plane = s->columns * s->batch, row = s->in * plane;
    vector sum[10][2];
    EACH(o, deep) EACH(v, wide) sum[o][v] = (vector){} + bias[o];
    for (whole i = down.from; i < down.to; i++)
        for (whole j = over.from; j < over.to; j++) {
            const float *pixel = x + i * row + j * s->batch, *w = weight + (i * s->across + j) * s->in * s->out;
            for (whole c = 0; c < s->in; c++, pixel += plane, w += s->out) {
                vector value[2];
                EACH(v, wide) value[v] = load(pixel + v * LANES);
                EACH(o, deep) EACH(v, wide) sum[o][v] += w[o] * value[v];
            }
        }
    EACH(o, deep) EACH(v, wide) store(y + o * step + v * LANES, sum[o][v]);
}

/* How many of the channels that are left the next tile takes. */
INLINE int depth(whole left) {
    left = smaller(left, DEEPEST);
    return left >= 10 ? 10 : left >= 8 ? 8 : left >= 5 ? 5 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* `deep` channels of one pixel, all samples. The last tile may overlap the one before it. */
static void pixel(int deep, const Layer *s, const float *x, const float *weight, const float *bias, float *y,
                  whole step, Range down, Range over) {
    int wide = s->batch >= 2 * LANES ? 2 : 1;
    for (whole n = 0, at; n < s->batch; n = at + wide * LANES) {
        at = smaller(n, s->batch - wide * LANES);
#define TILE(deep, wide) \
    case 16 * wide + deep: \
        tile(deep, wide, s, x + at, weight, bias, y + at, step, down, over); \
        break;
        switch (16 * wide + deep) {
            TILE(10, 2) TILE(8, 2) TILE(5, 2) TILE(4, 2) TILE(2, 2) TILE(1, 2)
            TILE(10, 1) TILE(8, 1) TILE(5, 1) TILE(4, 1) TILE(2, 1) TILE(1, 1)
        }
    }
}

/* y (H', O, W', N) = bias + x (H, C, W, N), framed with zeros, * weight (KH, KW, C, O). */
void convolve(const float *x, const float *weight, const float *bias, float *y, whole rows, whole columns, whole in,
              whole high, whole across, whole out, whole pad_rows, whole pad_columns, whole batch) {
    Layer s = {rows, columns, in, high, across, out, pad_rows, pad_columns, batch};
    whole out_rows = rows + 2 * pad_rows - high + 1, out_columns = columns + 2 * pad_columns - across + 1;
    whole step = out_columns * batch;
    for (whole h = 0; h < out_rows; h++) {
        Range down = inside(h, pad_rows, high, rows);
        for (whole o = 0, deep; o < out; o += deep) {
            deep = depth(out - o);
            for (whole w = 0; w < out_columns; w++) {
                Range over = inside(w, pad_columns, across, columns);
                const float *from = x + ((h - pad_rows) * in * columns + w - pad_columns) * batch;
                pixel(deep, &s, from, weight + o, bias + o, y + (h * out + o) * step + w * batch, step, down, over);
            }
        }
    }
}

/* ---- the gradient of weight ----------------------------------------------------------------- */

/* `os` channels by `ts` taps: the sum over some rows' pixels and samples of gradient * x. */
INLINE void dots(int os, int ts, const float *g, const float *x, const whole *taps, whole rows, whole length,
                 whole out, whole in_row, float *to, whole stride) {
    vector sum[5][5];
    float rest[5][5] = {};
    EACH(o, os) EACH(t, ts) sum[o][t] = (vector){};
    for (whole row = 0; row < rows; row++, g += out * length, x += in_row) {
        whole p = 0;
        for (; p + LANES <= length; p += LANES) {
            vector value[5];
            EACH(t, ts) value[t] = load(x + taps[t] + p);
            EACH(o, os) {
                vector gradient = load(g + o * length + p);
                EACH(t, ts) sum[o][t] += gradient * value[t];
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

/* How many of the channels or taps that are left the next square takes. */
INLINE int side(whole left) {
    left = smaller(left, SIDE);
    return left >= 5 ? 5 : left >= 3 ? 3 : 1;
}

/* to (O, taps) += the gradient of the weights, for g (H', O, W', N) and the taps' places in x. */
void weight_gradient(const float *g, const float *x, const whole *taps, float *to, whole count, whole rows,
                     whole columns, whole in_row, whole out, whole batch) {
    whole length = columns * batch, together = larger(1, 2048 / length); /* rows that fit into a cache */
    for (whole row = 0, now; row < rows; row += now) {
        now = smaller(together, rows - row);
        const float *from_x = x + row * in_row;
        for (whole t = 0, ts; t < count; t += ts) {
            ts = side(count - t);
            for (whole o = 0, os; o < out; o += os) {
                os = side(out - o);
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

/* The numbers of a vector where a mask is set, else 0. */
INLINE vector where(numbers mask, vector v) { return (vector)(mask & (numbers)v); }

/* Of two vectors the larger numbers, and which of them are the second's; NaN is the largest. */
INLINE numbers keep_larger(vector *most, vector other) {
    numbers is_other = (other > *most) | (other != other);
    *most = (vector)((is_other & (numbers)other) | (~is_other & (numbers)*most));
    return is_other;
}

/* y (H/2, C, W/2, N): the largest of each four pixels; which: the first of them that is it. If it shall be
   rectified, 0 where none is positive; which is then NONE. */
enum { NONE = 4 };
void halve(const float *x, float *y, unsigned char *which, whole rows, whole channels, whole columns, whole batch,
           whole rectify) {
    whole plane = columns * batch, out = columns / 2;
    for (whole h = 0; h < rows / 2; h++)
        for (whole c = 0; c < channels; c++)
            for (whole w = 0; w < out; w++) {
                const float *upper = x + (2 * h * channels + c) * plane + 2 * w * batch, *lower = upper + channels * plane;
                whole to = ((h * channels + c) * out + w) * batch;
                for (whole n = 0, at; n < batch; n = at + LANES) {
                    at = smaller(n, batch - LANES);
                    vector most = load(upper + at);
                    numbers right = keep_larger(&most, load(upper + batch + at));
                    numbers left_below = keep_larger(&most, load(lower + at));
                    numbers right_below = keep_larger(&most, load(lower + batch + at));
                    numbers first = (right_below & 3) | (~right_below & ((left_below & 2) | (~left_below & right & 1)));
                    if (rectify) {
                        numbers none = most <= 0;
                        most = where(~none, most);
                        first = (none & NONE) | (~none & first);
                    }
                    bytes code = __builtin_convertvector(first, bytes);
                    store(y + to + at, most);
                    memcpy(which + to + at, &code, sizeof code);
                }
            }
}

/* The gradient of x of `halve`: each number goes to the pixel that was the largest. */
void halve_gradient(const float *g, const unsigned char *which, float *x, whole rows, whole channels, whole columns,
                    whole batch) {
    whole plane = columns * batch, out = columns / 2;
    for (whole h = 0; h < rows / 2; h++)
        for (whole c = 0; c < channels; c++)
            for (whole w = 0; w < out; w++) {
                float *upper = x + (2 * h * channels + c) * plane + 2 * w * batch, *lower = upper + channels * plane;
                whole from = ((h * channels + c) * out + w) * batch;
                for (whole n = 0, at; n < batch; n = at + LANES) {
                    at = smaller(n, batch - LANES);
                    bytes code;
                    memcpy(&code, which + from + at, sizeof code);
                    numbers first = __builtin_convertvector(code, numbers);
                    vector gradient = load(g + from + at);
                    store(upper + at, where(first == 0, gradient));
                    store(upper + batch + at, where(first == 1, gradient));
                    store(lower + at, where(first == 2, gradient));
                    store(lower + batch + at, where(first == 3, gradient));
                }
            }
}

/* to (C) = the sum of g (H, C, W, N) where some pixel was positive. */
void bias_gradient(const float *g, const unsigned char *which, float *to, whole rows, whole channels, whole columns,
                   whole batch) {
    whole plane = columns * batch;
    for (whole c = 0; c < channels; c++) {
        vector sum = {};
        float rest = 0;
        for (whole h = 0; h < rows; h++) {
            whole from = (h * channels + c) * plane, p = 0;
            for (; p + LANES <= plane; p += LANES) {
                bytes code;
                memcpy(&code, which + from + p, sizeof code);
                sum += where(__builtin_convertvector(code, numbers) != NONE, load(g + from + p));
            }
            for (; p < plane; p++) rest += which[from + p] == NONE ? 0 : g[from + p];
        }
        for (int lane = 0; lane < LANES; lane++) rest += sum[lane];
        to[c] = rest;
    }
}

/* ---- both at once ---------------------------------------------------------------------------- */

/* `convolve` and `halve`, two rows at a time: what is between them, (2, O, W', N), stays in the cache. */
void convolve_halve(const float *x, const float *weight, const float *bias, float *between, float *y,
                    unsigned char *which, whole rows, whole columns, whole in, whole high, whole across, whole out,
                    whole batch, whole rectify) {
    whole out_columns = columns - across + 1, line = out * (out_columns / 2) * batch;
    for (whole h = 0; h + high < rows; h += 2, y += line, which += line) {
        convolve(x + h * in * columns * batch, weight, bias, between, high + 1, columns, in, high, across, out, 0, 0,
                 batch);
        halve(between, y, which, 2, out, out_columns, batch, rectify);
    }
}

/* `halve_gradient` and `weight_gradient`, two rows at a time; `between` holds zeros at first. */
void halve_weight_gradient(const float *g, const unsigned char *which, const float *x, const whole *taps,
                           float *between, float *to, whole count, whole rows, whole columns, whole in_row, whole out,
                           whole batch) {
    whole line = out * (columns / 2) * batch;
    for (whole h = 0; h + 1 < rows; h += 2, g += line, which += line) {
        halve_gradient(g, which, between, 2, out, columns, batch);
        weight_gradient(between, x + h * in_row, taps, to, count, 2, columns, in_row, out, batch);
    }
}

/* ---- to points and back ---------------------------------------------------------------------- */

enum { MOST = 8 }; /* points */
typedef struct { whole item, tile, plane; } Steps; /* from one to the next, in memory */

/* In each tile of each plane: `out` items of y = matrix (out, in) times `in` items of x. Where tiles of y overlap,
   as the next begins `apart` items on, they are added up: `sums` still holds what the tile before has there. */
INLINE void mix(int in, const float *x, Steps of_x, const float *matrix, float *y, Steps of_y, whole out, whole apart,
                whole planes, whole tiles, whole batch) {
    for (whole plane = 0; plane < planes; plane++)
        for (whole n = 0, at; n < batch; n = at + LANES) {
            at = smaller(n, batch - LANES);
            vector sums[2 * MOST] = {};
            for (whole tile = 0; tile < tiles; tile++) {
                const float *from = x + plane * of_x.plane + tile * of_x.tile + at;
                float *to = y + plane * of_y.plane + tile * of_y.tile + at;
                vector item[MOST];
                EACH(i, in) item[i] = load(from + i * of_x.item);
                for (whole o = 0; o < out; o++) {
                    vector sum = sums[o + apart];
                    EACH(i, in) sum += matrix[o * in + i] * item[i];
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

/* y (points, planes, tiles, N) = matrix (points, wide) times `wide` columns of x (planes, columns, N), for the tile
   that begins at every `step`-th of them. */
void to_points(const float *x, const float *matrix, float *y, whole planes, whole columns, whole tiles, whole wide,
               whole step, whole points, whole batch) {
    Steps of_x = {batch, step * batch, columns * batch}, of_y = {planes * tiles * batch, batch, tiles * batch};
    whole out = points, apart = MOST;
    switch (wide) { MIX(2) MIX(4) MIX(6) MIX(8) }
}

/* y (planes, columns, N) = matrix (wide, points) times the points of x (points, planes, tiles, N): `wide` columns a
   tile, from every `step`-th on. */
void from_points(const float *x, const float *matrix, float *y, whole planes, whole columns, whole tiles, whole wide,
                 whole step, whole points, whole batch) {
    Steps of_x = {planes * tiles * batch, batch, tiles * batch}, of_y = {batch, step * batch, columns * batch};
    whole out = wide, apart = step;
    switch (points) { MIX(4) MIX(6) MIX(8) }
}

/* ---- where a network begins and ends --------------------------------------------------------- */

/* to (H, C, W, N) = the chosen images of x (.., C, H, W); few at a time, each of which is read from its beginning
   to its end, as memory likes it best. */
void gather(const float *x, const whole *chosen, float *to, whole rows, whole channels, whole columns, whole batch) {
    for (whole first = 0; first < batch; first += 16)
        for (whole h = 0; h < rows; h++)
            for (whole c = 0; c < channels; c++) {
                float *plane = to + (h * channels + c) * columns * batch;
                for (whole n = first; n < smaller(first + 16, batch); n++) {
                    const float *from = x + ((chosen[n] * channels + c) * rows + h) * columns;
                    for (whole w = 0; w < columns; w++) plane[w * batch + n] = from[w];
                }
            }
}

/* The mean cross-entropy of x (classes, N) with the chosen labels, and its gradient g. A loss of -1 says that
   one of the labels is no class. */
void cross_entropy(const float *x, const whole *labels, const whole *chosen, float *g, float *loss, whole classes,
                   whole batch) {
    double total = 0;
    for (whole n = 0; n < batch; n++) {
        whole label = labels[chosen[n]];
        if (label < 0 || label >= classes) {
            *loss = -1;
            return;
        }
        float most = x[n], sum = 0;
        for (whole c = 1; c < classes; c++) most = fmaxf(most, x[c * batch + n]);
        for (whole c = 0; c < classes; c++) sum += g[c * batch + n] = expf(x[c * batch + n] - most);
        for (whole c = 0; c < classes; c++) g[c * batch + n] = (g[c * batch + n] / sum - (c == label)) / batch;
        total += logf(sum) + most - x[label * batch + n];
    }
    *loss = total / batch;
}

/* ---- the local step -------------------------------------------------------------------------- */

/* Equations (4), (5) and (3): m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, w -= lr m / sqrt(v + eps). */
void adam(float *restrict w, float *restrict m, float *restrict v, const float *restrict g, double lr, double beta1,
          double beta2, double eps, whole d) {
    float rate = lr, keep_m = beta1, new_m = 1 - beta1, keep_v = beta2, new_v = 1 - beta2, small = eps;
    for (whole i = 0; i < d; i++) {
        m[i] = keep_m * m[i] + new_m * g[i];
        v[i] = keep_v * v[i] + new_v * g[i] * g[i];
        w[i] -= rate * (m[i] / sqrtf(v[i] + small));
    }
}
