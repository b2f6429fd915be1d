#include "reduce_operators.h"

#include <stdio.h>

#include "all_reduce.h"
#include "combine.h"

static OrtStatus* reduce_by_nccl(Kernel* kernel, OrtKernelContext* context, int type, const void* in, void* out,
                                 size_t count) {
    void* stream = NULL;
    char message[MESSAGE];
    const KernelSums* sums = kernel->end->sums_by_kernels;
    size_t bytes = count * number_bytes(type);
    TRY(ORT(kernel->api, KernelContext_GetGPUComputeStream)(context, &stream));
    if (sums && kernel_sums_take(sums, (int)kernel->number, type, bytes)) {
        int error = kernel_sum(sums, type, in, out, bytes, stream);
        if (!error) return NULL;
        snprintf(message, sizeof message, "the kernel of a sum over GPUs can't be launched: CUDA error %d", error);
        return fail(kernel->api, message);
    }
    if (!number_bytes(type)) return fail(kernel->api, "NCCL has no such number type");
    int operation = kernel->number == MAX ? 2 : 0, known = number_type(type)->nccl;
    int status = kernel->end->nccl(in, out, count, known, operation, kernel->end->communicator, stream);
    if (!status) return NULL;
    snprintf(message, sizeof message, "NCCL's all-reduce failed with error %d", status);
    return fail(kernel->api, message);
}

static OrtStatus* reduce_on_host(Kernel* kernel, int type, const void* in, void* out, size_t count) {
    Member* member = &kernel->end->member;
    char message[MESSAGE];
    int who = -1;
    if (!number_bytes(type)) return fail(kernel->api, "the sum over ranks has no such number type");
    switch (all_reduce(member, (int)kernel->number, type, in, out, count, &who)) {
        case MEETING_OK: return NULL;
        case MEETING_LATE:
            snprintf(message, sizeof message, "rank %d did not come to a sum within %.0f s", who, member->patience);
            return fail(kernel->api, message);
        case MEETING_DIFFERENT:
            snprintf(message, sizeof message, "rank %d brings another shape or type to a sum than rank 0", who);
            return fail(kernel->api, message);
        case MEETING_APART: return fail(kernel->api, APART);
        default: return fail(kernel->api, "another rank failed, and a sum over ranks was given up");
    }
}

/* A sum of GPUs that NCCL does not connect: two ranks on one, or a GPU and a CPU. */
static OrtStatus* reduce_by_host(Kernel* kernel, OrtKernelContext* context, int type, const void* in, void* out,
                                 size_t count) {
    End* end = kernel->end;
    size_t bytes = count * number_bytes(type);
    void* stream = NULL;
    TRY(ORT(kernel->api, KernelContext_GetGPUComputeStream)(context, &stream));
    TRY(reserve_staging(kernel->api, end, bytes));
    if (end->copy(end->staged, in, bytes, COPY_DEFAULT, stream) || end->synchronize(stream))
        return fail(kernel->api, "the GPU failed before a sum over ranks");
    TRY(reduce_on_host(kernel, type, end->staged, end->staged, count));
    if (end->copy(out, end->staged, bytes, COPY_DEFAULT, stream) || end->synchronize(stream))
        return fail(kernel->api, "the GPU failed after a sum over ranks");
    return NULL;
}

static OrtStatus* compute(void* self, OrtKernelContext* context) {
    Kernel* kernel = self;
    const OrtApi* api = kernel->api;
    const OrtValue* value;
    OrtValue* made;
    OrtTensorTypeAndShapeInfo* info;
    int64_t sizes[64];
    size_t axes = 0, count = 0;
    int type = ORT_UNDEFINED;
    void *in, *out;
    TRY(ORT(api, KernelContext_GetInput)(context, 0, &value));
    TRY(ORT(api, GetTensorTypeAndShape)(value, &info));
    OrtStatus* status = ORT(api, GetDimensionsCount)(info, &axes);
    if (!status && axes > sizeof sizes / sizeof *sizes) status = fail(api, "a sum over ranks has too many axes");
    if (!status) status = ORT(api, GetDimensions)(info, sizes, axes);
    if (!status) status = ORT(api, GetTensorShapeElementCount)(info, &count);
    if (!status) status = ORT(api, GetTensorElementType)(info, &type);
    ORT(api, ReleaseTensorTypeAndShapeInfo)(info);
    if (status) return status;
    int64_t one = 1;
    TRY(ORT(api, KernelContext_GetOutput)(context, 1, &one, 1, &made)); /* the token, where a later one asks for it */
    TRY(ORT(api, KernelContext_GetOutput)(context, 0, sizes, axes, &made));
    TRY(ORT(api, GetTensorMutableData)((OrtValue*)value, &in));
    TRY(ORT(api, GetTensorMutableData)(made, &out));
    if (!kernel->end) return fail(api, "this engine was loaded without the ranks that it sums with");
    if (kernel->on_gpu && kernel->end->nccl) return reduce_by_nccl(kernel, context, type, in, out, count);
    if (kernel->on_gpu && kernel->end->copy) return reduce_by_host(kernel, context, type, in, out, count);
    if (kernel->on_gpu || kernel->end->nccl) return fail(api, "this sum over ranks is for another kind of device");
    return reduce_on_host(kernel, type, in, out, count);
}

static OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** made) {
    const Operator* own = (const Operator*)op;
    if (own->end) own->end->sums = 1;
    return make_kernel(op, api, info, "operation", made);
}

void init_all_reduce(Operator* made) {
    init_value_and_token(made);
    made->op.CreateKernelV2 = create;
    made->op.KernelComputeV2 = compute;
    made->op.GetMayInplace = first_is_first;
}
