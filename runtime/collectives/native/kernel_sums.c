#include "kernel_sums.h"

#include "combine.h"
#include "ort_api.h"

static int kernel_of(int type) {
    switch (type) {
        case ORT_FLOAT: return 0;
        case ORT_FLOAT16: return 1;
        case ORT_BFLOAT16: return 2;
        default: return -1;
    }
}

int kernel_sums_take(const KernelSums* sums, int operation, int type, size_t bytes) {
    return operation == SUM && kernel_of(type) >= 0 && bytes <= sums->most;
}

int kernel_sum(const KernelSums* sums, int type, const char* in, char* out, size_t bytes, void* stream) {
    const SumKernels* own = bytes <= sums->small.most ? &sums->small : &sums->large;
    int error = 0;
    for (size_t done = 0; done < bytes && !error; done += own->most) {
        const char* from = in + done;
        char* to = out + done;
        int size = (int)(bytes - done < own->most ? bytes - done : own->most);
        void* parameters[] = {&from, &to, &size, own->group};
        unsigned block = own->threads * own->width;
        unsigned blocks = own->blocks ? own->blocks : (size + block - 1) / block;
        error = sums->launch(own->kernels[kernel_of(type)], blocks, 1, 1, own->threads, 1, 1, 0, stream, parameters, NULL);
    }
    return error;
}
