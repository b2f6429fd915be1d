#include "one_shot.h"

#include "combine.h"
#include "ort_api.h"

/* Threads of a block, and the bytes that each one sums: as runtime/collectives/one_shot.py has it. */
enum { THREADS = 128, WIDTH = 8 };

static int kernel_of(int type) {
    switch (type) {
        case ORT_FLOAT: return 0;
        case ORT_FLOAT16: return 1;
        case ORT_BFLOAT16: return 2;
        default: return -1;
    }
}

int one_shot_takes(const OneShot* sums, int operation, int type, size_t bytes) {
    return operation == SUM && kernel_of(type) >= 0 && bytes <= sums->most;
}

int one_shot_sum(const OneShot* sums, int type, const void* in, void* out, size_t bytes, void* stream) {
    unsigned blocks = (unsigned)((bytes + THREADS * WIDTH - 1) / (THREADS * WIDTH));
    int size = (int)bytes;
    void* parameters[] = {&in, &out, &size, sums->group};
    if (!blocks) return 0;
    return sums->launch(sums->kernels[kernel_of(type)], blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, NULL);
}
