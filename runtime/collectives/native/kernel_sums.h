/* Sums over GPUs by kernels, which write to the other GPUs' memory. The kernels come from Python. */
#ifndef SPLITC_KERNEL_SUMS_H
#define SPLITC_KERNEL_SUMS_H

#include <stddef.h>

/* CUDA's cuLaunchKernel. */
typedef int (*LaunchKernel)(void* kernel, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                            unsigned threads_y, unsigned threads_z, unsigned shared, void* stream, void** parameters,
                            void** extra);

/* Kernels for float32, float16 and bfloat16, which sum up to `most` bytes in blocks of so many `threads`. Each thread sums
 * `width` bytes, or there are `blocks` blocks, if that is not 0. `group` are the kernel's last parameter's bytes, which stay
 * where they are. */
typedef struct SumKernels {
    void* kernels[3];
    void* group;
    size_t most;
    unsigned threads, width, blocks;
} SumKernels;

/* Those for small sums, and those that sum larger ones piece by piece, of up to `most` bytes in all. */
typedef struct KernelSums {
    LaunchKernel launch;
    SumKernels small, large;
    size_t most;
} KernelSums;

/* Whether kernels do this sum. All ranks get the same answer. */
int kernel_sums_take(const KernelSums* sums, int operation, int type, size_t bytes);
/* Put the sum of `bytes` bytes on the stream. Returns CUDA's error, or 0. */
int kernel_sum(const KernelSums* sums, int type, const char* in, char* out, size_t bytes, void* stream);

#endif
