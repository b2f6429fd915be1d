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

/* By their numbers in ONNX. */
static const NumberType types[] = {
    [ORT_FLOAT] = {4, 7, combine_float},
    [ORT_UINT8] = {1, 1, combine_uint8},
    [ORT_INT8] = {1, 0, combine_int8},
    [ORT_INT32] = {4, 2, combine_int32},
    [ORT_INT64] = {8, 4, combine_int64},
    [ORT_FLOAT16] = {2, 6, combine_float16},
    [ORT_DOUBLE] = {8, 8, combine_double},
    [ORT_UINT32] = {4, 3, combine_uint32},
    [ORT_BFLOAT16] = {2, 9, combine_bfloat16},
    /* Only sent: 16 bits, booleans, 64 bits, complex, 8 bits. */
    [4] = {2}, [5] = {2}, [9] = {1}, [13] = {8}, [14] = {8}, [15] = {16}, [17] = {1}, [18] = {1}, [19] = {1}, [20] = {1},
};

const NumberType* number_type(int type) {
    return &types[type >= 0 && (size_t)type < sizeof types / sizeof *types ? type : ORT_UNDEFINED];
}

size_t number_bytes(int type) {
    const NumberType* known = number_type(type);
    return known->combine ? known->bytes : 0;
}
