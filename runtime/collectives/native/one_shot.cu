// Sums over GPUs by one kernel: see runtime/collectives/one_shot.py, which compiles it, with MOST_RANKS defined.
#include <cuda_fp16.h>

struct Group {
    uint4* places[MOST_RANKS];  // each rank's memory, for all that others write to it
    unsigned* turns;                // the number of each block's last sum
    int* failed;                    // on the host: 1 and the rank that did not come, or 0
    unsigned long long patience;    // in nanoseconds
    int ranks, rank, words;         // `words` of 8 bytes have room in each place
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

__device__ void write(uint4* place, uint2 word, unsigned turn) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(place), "r"(word.x), "r"(turn), "r"(word.y), "r"(turn) : "memory");
}

__device__ bool late(const Group& group, int source, unsigned long long& since) {
    volatile int* failed = group.failed;
    if (!since) since = now();
    if (!*failed && now() - since > group.patience) *failed = 1 + source;
    return *failed;
}

__device__ uint2 read(const uint4* place, unsigned turn, int source, const Group& group) {
    unsigned long long since = 0;
    for (unsigned looks = 1;; ++looks) {
        uint4 found;
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(place) : "memory");
        if (found.y == turn && found.w == turn) return make_uint2(found.x, found.z);
        if (looks % 16384 == 0 && late(group, source, since)) return make_uint2(0, 0);
    }
}

// Up to 8 bytes, wherever they are.
__device__ uint2 load(const char* from, int size) {
    if (size == 8 && (size_t)from % 8 == 0) return *(const uint2*)from;
    uint2 word = make_uint2(0, 0);
    for (int place = 0; place < size; ++place) ((char*)&word)[place] = from[place];
    return word;
}

__device__ void store(char* to, uint2 word, int size) {
    if (size == 8 && (size_t)to % 8 == 0) *(uint2*)to = word;
    else for (int place = 0; place < size; ++place) to[place] = ((char*)&word)[place];
}

template <typename Number>
__device__ void sum(const char* in, char* out, int bytes, const Group& group) {
    const int count = 8 / sizeof(Number);
    const int place = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned turn = group.turns[blockIdx.x] + 1;
    if (8 * place < bytes) {
        const int size = min(8, bytes - 8 * place);
        const uint2 own = load(in + 8 * place, size);
        const size_t first = (size_t)(turn % 2) * group.ranks * group.words + place;
        for (int hop = 1; hop < group.ranks; ++hop) {  // not all to the same rank at the same time
            const int other = (group.rank + hop) % group.ranks;
            write(group.places[other] + first + (size_t)group.rank * group.words, own, turn);
        }
        float totals[count] = {};
        for (int source = 0; source < group.ranks; ++source) {  // in one order: all ranks get the same bits
            const uint4* arrives = group.places[group.rank] + first + (size_t)source * group.words;
            const uint2 part = source == group.rank ? own : read(arrives, turn, source, group);
            for (int number = 0; number < count; ++number) totals[number] += widen(((const Number*)&part)[number]);
        }
        uint2 whole;
        for (int number = 0; number < count; ++number) narrow(totals[number], (Number*)&whole + number);
        store(out + 8 * place, whole, size);
    }
    __syncthreads();  // all threads have read the turn
    if (threadIdx.x == 0) group.turns[blockIdx.x] = turn;
}

extern "C" __global__ void sum_float(const char* in, char* out, int bytes, const Group group) {
    sum<float>(in, out, bytes, group);
}
extern "C" __global__ void sum_half(const char* in, char* out, int bytes, const Group group) {
    sum<__half>(in, out, bytes, group);
}
extern "C" __global__ void sum_bfloat16(const char* in, char* out, int bytes, const Group group) {
    sum<bfloat16>(in, out, bytes, group);
}
