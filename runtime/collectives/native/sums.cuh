// What the kernels of sums over GPUs have in common. runtime/collectives/kernel_sums.py compiles them behind this, and defines
// MOST_RANKS.
#include <cuda_fp16.h>

struct Group {
    char* places[MOST_RANKS];       // each rank's memory, for all that others write to it
    unsigned* epochs;                // the number of each block's last sum
    int* failed;                    // on the host: 1 and the rank that did not come, or 0
    unsigned long long patience;    // in nanoseconds
    int ranks, rank;
    int words;                      // of 8 bytes that a small sum has at most
    int share;                      // words of 16 bytes that a rank sums of a large one at most
};

struct bfloat16 { unsigned short bits; };
__device__ float widen(float number) { return number; }
__device__ float widen(__half number) { return __half2float(number); }
__device__ float widen(bfloat16 number) { return __uint_as_float((unsigned)number.bits << 16); }
__device__ void narrow(float total, float* number) { *number = total; }
__device__ void narrow(float total, __half* number) { *number = __float2half_rn(total); }
__device__ void narrow(float total, bfloat16* number) {
    unsigned bits = __float_as_uint(total);
    // To the nearest, ties to even. A NaN stays one.
    number->bits = total != total ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

__device__ unsigned long long now() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

// Whether to give up waiting for a rank; asked from time to time. `since` is 0 at first.
__device__ bool late(const Group& group, int source, unsigned long long& since) {
    volatile int* failed = group.failed;
    if (!since) since = now();
    if (!*failed && now() - since > group.patience) *failed = 1 + source;
    return *failed;
}

// A word, of which `size` bytes are there, wherever it lies.
template <typename Word>
__device__ Word load(const char* from, int size) {
    if (size >= (int)sizeof(Word) && (size_t)from % sizeof(Word) == 0) return *(const Word*)from;
    Word word = {};
    for (int place = 0; place < min(size, (int)sizeof(Word)); ++place) ((char*)&word)[place] = from[place];
    return word;
}

template <typename Word>
__device__ void store(char* to, Word word, int size) {
    if (size >= (int)sizeof(Word) && (size_t)to % sizeof(Word) == 0) *(Word*)to = word;
    else for (int place = 0; place < min(size, (int)sizeof(Word)); ++place) to[place] = ((char*)&word)[place];
}

// Adds the numbers of a word to `totals`.
template <typename Number, typename Word>
__device__ void add(float* totals, Word part) {
    for (int place = 0; place < (int)(sizeof(Word) / sizeof(Number)); ++place)
        totals[place] += widen(((const Number*)&part)[place]);
}

template <typename Number, typename Word>
__device__ Word rounded(const float* totals) {
    Word word;
    for (int place = 0; place < (int)(sizeof(Word) / sizeof(Number)); ++place)
        narrow(totals[place], (Number*)&word + place);
    return word;
}

// The kernels of the number types, in the order of the C library.
#define KERNELS(kind)                                                                                                  \
    extern "C" __global__ void kind##_float(const char* in, char* out, int bytes, const Group group) {                 \
        kind<float>(in, out, bytes, group);                                                                             \
    }                                                                                                                  \
    extern "C" __global__ void kind##_half(const char* in, char* out, int bytes, const Group group) {                  \
        kind<__half>(in, out, bytes, group);                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void kind##_bfloat16(const char* in, char* out, int bytes, const Group group) {              \
        kind<bfloat16>(in, out, bytes, group);                                                                          \
    }
