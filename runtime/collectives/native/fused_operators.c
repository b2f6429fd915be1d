#include "fused_operators.h"

#include <stdio.h>
#include <stdlib.h>

enum { ALIGNED = 16, MOST_AXES = 16 };

typedef struct Fused {
    Operator own;
    FusedOperators* all;
    FusedKernel kernel;
} Fused;

struct FusedOperators {
    _Atomic int users; /* who made them, and the kernels: the last one that goes frees them */
    const OrtApi* api;
    OrtCustomOpDomain* domain;
    LaunchKernel launch;
    int count;
    Fused operators[];
};

/* The arguments of a kernel: those of runtime/engines/fused_source.py. `count` are an input's rows. */
typedef struct Arguments {
    const void* in[FUSED_INPUTS];
    unsigned count[FUSED_INPUTS];
    void* out;
    unsigned rows, sequence;
} Arguments;

static const Fused* fused(const OrtCustomOp* op) { return (const Fused*)op; }
static size_t inputs(const OrtCustomOp* op) { return fused(op)->kernel.inputs; }
static size_t one(const OrtCustomOp* op) { return (void)op, 1; }
static int required(const OrtCustomOp* op, size_t index) { return (void)op, (void)index, ORT_REQUIRED; }
static int result_type(const OrtCustomOp* op, size_t index) { return (void)index, fused(op)->kernel.type; }
static int type_of(const OrtCustomOp* op, size_t index) {
    return fused(op)->kernel.integers >> index & 1 ? ORT_INT64 : fused(op)->kernel.type;
}

static OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** made) {
    (void)api, (void)info;
    atomic_fetch_add(&fused(op)->all->users, 1);
    *made = (void*)op;
    return NULL;
}

static void destroy(void* made) { release_fused(((Fused*)made)->all); }

/* Read an input's address and rows; and the sizes of the first one, whose number of axes is returned in `axes`. */
static OrtStatus* read(const Fused* own, OrtKernelContext* context, unsigned number, Arguments* given, int64_t* sizes,
                       size_t* axes) {
    const OrtApi* api = own->all->api;
    const OrtValue* value;
    OrtTensorTypeAndShapeInfo* info;
    size_t count = 0;
    void* data;
    TRY(ORT(api, KernelContext_GetInput)(context, number, &value));
    TRY(ORT(api, GetTensorTypeAndShape)(value, &info));
    OrtStatus* status = ORT(api, GetTensorShapeElementCount)(info, &count);
    if (!number && !status) status = ORT(api, GetDimensionsCount)(info, axes);
    if (!number && !status && *axes > MOST_AXES) status = fail(api, "the data of a fused operator have too many axes");
    if (!number && !status) status = ORT(api, GetDimensions)(info, sizes, *axes);
    ORT(api, ReleaseTensorTypeAndShapeInfo)(info);
    if (status) return status;
    TRY(ORT(api, GetTensorMutableData)((OrtValue*)value, &data));
    unsigned width = own->kernel.widths[number];
    if (count % width || count / width > UINT32_MAX) return fail(api, "an input of a fused operator has the wrong size");
    if (width > 1 && (size_t)data % ALIGNED) return fail(api, "an input of a fused operator is not aligned");
    given->in[number] = data;
    given->count[number] = (unsigned)(count / width);
    return NULL;
}

/* Whether all inputs have the rows that the kernel reads. */
static int fits(const FusedKernel* kernel, const Arguments* given) {
    for (unsigned number = 0; number < kernel->inputs; number++) {
        unsigned count = given->count[number], bit = 1u << number;
        if (kernel->whole & bit && count != given->rows) return 0;
        if (!count || (!(kernel->looked_up & bit) && given->rows % count)) return 0;
    }
    return 1;
}

static OrtStatus* compute(void* made, OrtKernelContext* context) {
    const Fused* own = made;
    const OrtApi* api = own->all->api;
    Arguments given = {0};
    int64_t sizes[MOST_AXES] = {0};
    size_t axes = 0;
    OrtValue* output;
    void* stream = NULL;
    char message[MESSAGE];
    for (unsigned number = 0; number < own->kernel.inputs; number++)
        TRY(read(own, context, number, &given, sizes, &axes));
    TRY(ORT(api, KernelContext_GetOutput)(context, 0, sizes, axes, &output));
    TRY(ORT(api, GetTensorMutableData)(output, &given.out));
    given.rows = given.count[0];
    given.sequence = axes > 1 ? (unsigned)sizes[1] : 1;
    if (!given.rows) return NULL;
    if (!fits(&own->kernel, &given)) return fail(api, "the inputs of a fused operator have sizes that don't go together");
    if (own->own.on_gpu) TRY(ORT(api, KernelContext_GetGPUComputeStream)(context, &stream));
    void* parameters[] = {&given};
    unsigned blocks = (given.rows + own->kernel.rows - 1) / own->kernel.rows;
    int error = own->all->launch(own->kernel.function, blocks, 1, 1, own->kernel.threads, 1, 1, 0, stream, parameters, NULL);
    if (!error) return NULL;
    snprintf(message, sizeof message, "the kernel of a fused operator can't be launched: CUDA error %d", error);
    return fail(api, message);
}

FusedOperators* make_fused(const FusedKernel* kernels, int count, int on_gpu, LaunchKernel launch) {
    FusedOperators* all = calloc(1, sizeof *all + (size_t)count * sizeof *all->operators);
    if (!all) return NULL;
    all->users = 1;
    all->count = count, all->launch = launch;
    for (int number = 0; number < count; number++) {
        Fused* made = &all->operators[number];
        made->all = all, made->kernel = kernels[number];
        init_operator(&made->own, made->kernel.name, on_gpu, NULL);
        made->own.op.GetInputTypeCount = inputs;
        made->own.op.GetOutputTypeCount = one;
        made->own.op.GetInputType = type_of;
        made->own.op.GetOutputType = result_type;
        made->own.op.GetInputCharacteristic = made->own.op.GetOutputCharacteristic = required;
        made->own.op.CreateKernelV2 = create;
        made->own.op.KernelComputeV2 = compute;
        made->own.op.KernelDestroy = destroy;
        made->own.op.GetMayInplace = first_is_first; /* a thread reads its numbers before it writes them */
    }
    return all;
}

static OrtStatus* make_domain(FusedOperators* all, const OrtApi* api) {
    OrtCustomOpDomain* domain;
    TRY(ORT(api, CreateCustomOpDomain)("splitc.fused", &domain));
    for (int number = 0; number < all->count; number++) {
        OrtStatus* status = ORT(api, CustomOpDomain_Add)(domain, &all->operators[number].own.op);
        if (status) {
            ORT(api, ReleaseCustomOpDomain)(domain);
            return status;
        }
    }
    all->api = api, all->domain = domain;
    return NULL;
}

OrtStatus* add_fused(FusedOperators* all, const OrtApi* api, OrtSessionOptions* options) {
    if (!all->domain) TRY(make_domain(all, api));
    return ORT(api, AddCustomOpDomain)(options, all->domain);
}

void release_fused(FusedOperators* all) {
    if (!all || atomic_fetch_sub(&all->users, 1) != 1) return;
    if (all->domain) ORT(all->api, ReleaseCustomOpDomain)(all->domain);
    free(all);
}
