// Large sums over GPUs: each GPU gets its share of all parts, adds it up, and gives the whole share to all.
//
// Block k of a GPU only waits for the blocks k of the others, and all sums have the same number of blocks. What is written
// to another GPU is told by a flag, the number of the sum, that is released after it.

// Where a rank's memory for large sums begins, behind that for small ones; its parts; its whole shares; its flags.
__device__ uint4* parts_of(const Group& group, int rank, unsigned epoch, int source) {
    uint4* base = (uint4*)group.places[rank] + (size_t)2 * group.ranks * group.words;
    return base + ((size_t)(epoch % 2) * group.ranks + source) * group.share;
}

__device__ uint4* wholes_of(const Group& group, int rank, unsigned epoch) {
    return parts_of(group, rank, 0, 0) + (size_t)(2 + epoch % 2) * group.ranks * group.share;
}

__device__ unsigned* flag_of(const Group& group, int rank, int phase, int source) {
    unsigned* flags = (unsigned*)(parts_of(group, rank, 0, 0) + (size_t)4 * group.ranks * group.share);
    return flags + (size_t)(phase * group.ranks + source) * gridDim.x + blockIdx.x;
}

// Tell all others what this block has written to them, and wait until they have written to this one.
__device__ void exchange(const Group& group, int phase, unsigned epoch) {
    __syncthreads();
    const int other = threadIdx.x;
    if (other < group.ranks && other != group.rank) {
        unsigned found, looks = 0;
        unsigned long long since = 0;
        asm volatile("st.release.sys.global.u32 [%0], %1;"
                     :: "l"(flag_of(group, other, phase, group.rank)), "r"(epoch) : "memory");
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(found) : "l"(flag_of(group, group.rank, phase, other)) : "memory");
        } while (found != epoch && !(++looks % 16384 == 0 && late(group, other, since)));
    }
    __syncthreads();
}

template <typename Number>
__device__ void two_shot(const char* in, char* out, int bytes, const Group& group) {
    const int words = (bytes + 15) / 16, share = (words + group.ranks - 1) / group.ranks, own = group.rank * share;
    const int piece = (share + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * piece + threadIdx.x;
    const int end = min(share, (int)(blockIdx.x + 1) * piece);
    const unsigned epoch = group.epochs[blockIdx.x] + 1;
    for (int hop = 1; hop < group.ranks; ++hop) {  // not all to the same rank at the same time
        const int other = (group.rank + hop) % group.ranks, first = other * share;
        uint4* part = parts_of(group, other, epoch, group.rank);
        for (int place = begin; place < min(end, words - first); place += blockDim.x)
            part[place] = load<uint4>(in + 16ll * (first + place), bytes - 16 * (first + place));
    }
    exchange(group, 0, epoch);
    for (int place = begin; place < min(end, words - own); place += blockDim.x) {
        const int size = bytes - 16 * (own + place);
        float totals[16 / sizeof(Number)] = {};
        for (int source = 0; source < group.ranks; ++source) {  // in one order, as the small sums
            const uint4* part = parts_of(group, group.rank, epoch, source) + place;
            add<Number>(totals, source == group.rank ? load<uint4>(in + 16ll * (own + place), size) : __ldcg(part));
        }
        const uint4 whole = rounded<Number, uint4>(totals);
        store(out + 16ll * (own + place), whole, size);
        for (int hop = 1; hop < group.ranks; ++hop)
            wholes_of(group, (group.rank + hop) % group.ranks, epoch)[own + place] = whole;
    }
    exchange(group, 1, epoch);
    for (int hop = 1; hop < group.ranks; ++hop) {
        const int first = (group.rank + hop) % group.ranks * share;
        for (int place = begin; place < min(end, words - first); place += blockDim.x)
            store(out + 16ll * (first + place), __ldcg(wholes_of(group, group.rank, epoch) + first + place),
                  bytes - 16 * (first + place));
    }
    if (threadIdx.x == 0) group.epochs[blockIdx.x] = epoch;
}

KERNELS(two_shot)
