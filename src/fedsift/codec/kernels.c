/* Read range codes, and add sparse values to a sum: the inner loops of a server.
 *
 * The codes come from clients and may contain anything. Every function returns after a number of
 * steps that its caller has fixed, reads no byte outside the code, and writes no byte outside the
 * output, whatever the code contains. tests/codec/test_kernels.py compares them with the Python
 * implementations.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef ptrdiff_t isize;

enum { PRECISION = 24, LOOKUP_BITS = 12, LOW_BITS_AT_ONCE = 16, AHEAD = 24 };

/* ---- the range decoder of the library constriction: 32-bit words, a 64-bit state ------------- */

typedef struct {
    uint64_t lower, range, point;
    int64_t at;     /* the number of bytes read */
    int64_t failed; /* 1 if no encoder writes the code */
} Decoder;

/* The next four bytes, big endian; the code continues with zeros. */
static uint64_t next_word(Decoder *s, const uint8_t *code, isize size) {
    uint64_t word = 0;
    for (int i = 0; i < 4; i++, s->at++) word = word << 8 | (s->at < size ? code[s->at] : 0);
    return word;
}

void start_decoder(Decoder *s, const uint8_t *code, isize size) {
    *s = (Decoder){.range = UINT64_MAX};
    s->point = next_word(s, code, size) << 32;
    s->point |= next_word(s, code, size);
}

/* The position of the point in the range, in units of 2^-24 of it. */
static inline uint64_t quantile_of(const Decoder *s, uint64_t scale) { return (s->point - s->lower) / scale; }

static inline void narrow(Decoder *s, const uint8_t *code, isize size, uint64_t scale, uint64_t left, uint64_t width) {
    s->lower += scale * left;
    s->range = scale * width;
    if (s->range >> 32 == 0) {
        s->lower <<= 32;
        s->range <<= 32;
        s->point = s->point << 32 | next_word(s, code, size);
    }
}

/* Decode n symbols, whose probabilities are `weights` / 2^24; they add up to 2^24. */
void decode_symbols(Decoder *state, const uint8_t *code, isize size, const int64_t *weights, isize symbols,
                    uint8_t *out, isize n) {
    uint32_t left[257] = {0};
    uint8_t first[(1 << LOOKUP_BITS) + 1];
    for (isize i = 0; i < symbols; i++) left[i + 1] = left[i] + (uint32_t)weights[i];
    for (isize at = 0, i = 0; at <= 1 << LOOKUP_BITS; at++) {
        while (i < symbols - 1 && left[i + 1] <= (uint32_t)(at << (PRECISION - LOOKUP_BITS))) i++;
        first[at] = (uint8_t)i; /* the symbol at the start of each 4096th of the range */
    }
    Decoder s = *state;
    for (isize i = 0; i < n && !s.failed; i++) {
        uint64_t scale = s.range >> PRECISION, quantile = quantile_of(&s, scale);
        if (quantile >> PRECISION) {
            s.failed = 1;
        } else {
            isize symbol = first[quantile >> (PRECISION - LOOKUP_BITS)];
            while (left[symbol + 1] <= quantile) symbol++;
            narrow(&s, code, size, scale, left[symbol], left[symbol + 1] - left[symbol]);
            out[i] = (uint8_t)symbol;
        }
    }
    *state = s;
}

/* Turn n buckets into gaps: the bucket's lowest gap, plus low bits that follow in the code. */
void decode_low_bits(Decoder *state, const uint8_t *code, isize size, const uint8_t *buckets,
                     const int64_t *lowest, const int64_t *low_bits, int64_t *gaps, isize n) {
    Decoder s = *state;
    for (isize i = 0; i < n; i++) gaps[i] = lowest[buckets[i]];
    for (int shift = 0; shift <= LOW_BITS_AT_ONCE; shift += LOW_BITS_AT_ONCE) {
        for (isize i = 0; i < n && !s.failed; i++) {
            int64_t bits = low_bits[buckets[i]] - shift;
            if (bits <= 0) continue;
            if (bits > LOW_BITS_AT_ONCE) bits = LOW_BITS_AT_ONCE;
            uint64_t scale = s.range >> PRECISION, quantile = quantile_of(&s, scale);
            if (quantile >> PRECISION) {
                s.failed = 1;
            } else {
                uint64_t symbol = quantile >> (PRECISION - bits), width = 1 << (PRECISION - bits);
                narrow(&s, code, size, scale, symbol * width, width);
                gaps[i] += (int64_t)(symbol << shift);
            }
        }
    }
    *state = s;
}

/* ---- target[indices[i]] += values[i]; counts the indices outside of the target --------------- */

void add_at(float *target, isize d, const int64_t *indices, const float *values, isize n,
            int64_t *outside) {
    for (isize i = 0; i < n; i++) {
        if (i + AHEAD < n) __builtin_prefetch(&target[indices[i + AHEAD]], 1);
        if ((uint64_t)indices[i] < (uint64_t)d)
            target[indices[i]] += values[i];
        else
            ++*outside;
    }
}
