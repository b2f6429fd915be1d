#include "combine.h"

#include <stdint.h>
#include <string.h>

#include "ort_api.h"

/* Elements that are worked on at a time, so that what is added up stays in the nearest cache. */
#define CHUNK 512

static float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &wide, sizeof number);
    return number;
}

static uint16_t to_bfloat16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* not a number stays none */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);                 /* to the nearest, ties to even */
}

#ifdef __FLT16_MAX__
static float from_float16(uint16_t bits) {
    _Float16 number;
    memcpy(&number, &bits, sizeof number);
    return (float)number;
}

static uint16_t to_float16(float number) {
    _Float16 half = (_Float16)number;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}
#else
/* By scaling: the exponent of a half is moved to where a float has it, and the float unit does the rest. */
static float from_float16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7fff) << 13;
    float number;
    if (rest >= 0x0f800000) rest += 0x70000000; /* infinite, or not a number */
    memcpy(&number, &rest, sizeof number);
    if (rest < 0x0f800000) number *= 0x1p112f;
    memcpy(&rest, &number, sizeof rest);
    rest |= sign;
    memcpy(&number, &rest, sizeof number);
    return number;
}

static uint16_t to_float16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) { /* too small for an exponent: the sum's last bits are the half's */
        float small;
        memcpy(&small, &bits, sizeof small);
        small += 0.5f;
        memcpy(&bits, &small, sizeof bits);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}
#endif

#define IDENTITY(x) (x)
/* As numpy does it: what is not a number wins. */
#define GREATER(a, b) ((a) >= (b) || (a) != (a) ? (a) : (b))

/* One function a type: `wide` is what it is added up in. */
#define COMBINE(name, type, wide, widen, narrow)                                                                     \
    static void name(int operation, int ranks, const void* const* inputs, void* const* outputs, size_t first,        \
                     size_t last) {                                                                                  \
        wide total[CHUNK];                                                                                           \
        for (size_t at = first; at < last; at += CHUNK) {                                                            \
            size_t count = last - at < CHUNK ? last - at : CHUNK;                                                    \
            const type* own = (const type*)inputs[0] + at;                                                           \
            for (size_t i = 0; i < count; i++) total[i] = widen(own[i]);                                             \
            for (int rank = 1; rank < ranks; rank++) {                                                               \
                const type* other = (const type*)inputs[rank] + at;                                                  \
                if (operation == SUM)                                                                                \
                    for (size_t i = 0; i < count; i++) total[i] = (wide)(total[i] + widen(other[i]));                \
                else                                                                                                 \
                    for (size_t i = 0; i < count; i++) total[i] = GREATER(total[i], widen(other[i]));                \
            }                                                                                                        \
            type* made = (type*)outputs[0] + at;                                                                     \
            for (size_t i = 0; i < count; i++) made[i] = narrow(total[i]);                                           \
            for (int rank = 1; rank < ranks; rank++)                                                                 \
                if (outputs[rank] != outputs[0]) memcpy((type*)outputs[rank] + at, made, count * sizeof(type));      \
        }                                                                                                            \
    }

COMBINE(combine_float, float, float, IDENTITY, IDENTITY)
COMBINE(combine_double, double, double, IDENTITY, IDENTITY)
COMBINE(combine_float16, uint16_t, float, from_float16, to_float16)
COMBINE(combine_bfloat16, uint16_t, float, from_bfloat16, to_bfloat16)
/* Whole numbers wrap around, which C leaves open where they have a sign. */
COMBINE(combine_uint8, uint8_t, uint8_t, IDENTITY, IDENTITY)
COMBINE(combine_uint32, uint32_t, uint32_t, IDENTITY, IDENTITY)
COMBINE(combine_int8, int8_t, int8_t, IDENTITY, IDENTITY)
COMBINE(combine_int32, int32_t, int64_t, IDENTITY, (int32_t))
COMBINE(combine_int64, int64_t, int64_t, IDENTITY, IDENTITY)

size_t number_bytes(int type) {
    switch (type) {
        case ORT_UINT8:
        case ORT_INT8: return 1;
        case ORT_FLOAT16:
        case ORT_BFLOAT16: return 2;
        case ORT_FLOAT:
        case ORT_INT32:
        case ORT_UINT32: return 4;
        case ORT_DOUBLE:
        case ORT_INT64: return 8;
        default: return 0;
    }
}

void combine(int operation, int type, int ranks, const void* const* inputs, void* const* outputs, size_t first,
             size_t last) {
    switch (type) {
        case ORT_FLOAT: combine_float(operation, ranks, inputs, outputs, first, last); break;
        case ORT_DOUBLE: combine_double(operation, ranks, inputs, outputs, first, last); break;
        case ORT_FLOAT16: combine_float16(operation, ranks, inputs, outputs, first, last); break;
        case ORT_BFLOAT16: combine_bfloat16(operation, ranks, inputs, outputs, first, last); break;
        case ORT_UINT8: combine_uint8(operation, ranks, inputs, outputs, first, last); break;
        case ORT_INT8: combine_int8(operation, ranks, inputs, outputs, first, last); break;
        case ORT_UINT32: combine_uint32(operation, ranks, inputs, outputs, first, last); break;
        case ORT_INT32: combine_int32(operation, ranks, inputs, outputs, first, last); break;
        case ORT_INT64: combine_int64(operation, ranks, inputs, outputs, first, last); break;
    }
}
