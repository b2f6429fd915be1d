/* Small sums over GPUs by one kernel, which writes to the other GPUs' memory. The kernel comes from Python. */
#ifndef SPLITC_ONE_SHOT_H
#define SPLITC_ONE_SHOT_H

#include <stddef.h>

/* CUDA's cuLaunchKernel. */
typedef int (*LaunchKernel)(void* kernel, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                            unsigned threads_y, unsigned threads_z, unsigned shared, void* stream, void** parameters,
                            void** extra);

/* `kernels` are those for float32, float16 and bfloat16. `group` are their last parameter's bytes, which stay where they
 * are. The kernel sums up to `most` bytes. */
typedef struct OneShot {
    LaunchKernel launch;
    void* kernels[3];
    void* group;
    size_t most;
} OneShot;

/* Whether the kernel does this sum. All ranks get the same answer. */
int one_shot_takes(const OneShot* sums, int operation, int type, size_t bytes);
/* Put the sum of `bytes` bytes on the stream. Returns CUDA's error, or 0. */
int one_shot_sum(const OneShot* sums, int type, const void* in, void* out, size_t bytes, void* stream);

#endif
