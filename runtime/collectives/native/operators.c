/* The operators that ranks' engines meet in, for ONNX Runtime, on the CPU and on CUDA devices: splitc.AllReduce, and
 * those of transfer_operators.c.
 *
 * Values in half precision have operators of their own, as AllReduceHalf. ONNX Runtime's CPU provider computes in single
 * precision where it has no kernel for halves, and takes in what lies between such nodes if it takes both: then one rank
 * would bring other numbers than another one does.
 *
 * An engine's operators belong to one rank of one group of ranks: an `End`. ONNX Runtime asks for operators when it is given
 * this library, by `RegisterCustomOps`, on the thread that gives it; so the end is named to that thread before. */
#include "operators.h"

#include <stdio.h>
#include <stdlib.h>

#include "combine.h"
#include "kernel_sums.h"
#include "transfers.h"

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Room that is so many times larger than what is needed is given back after so many times of less: as in demand.py. */
enum { WASTE = 8, RECENT = 1000 };

static _Thread_local End* registered;

OrtStatus* make_room(const OrtApi* api, End* end, size_t bytes) {
    end->calm = end->room / WASTE > bytes ? end->calm + 1 : 0;
    if (bytes <= end->room && end->calm < RECENT) return NULL;
    free(end->staged);
    end->staged = malloc(bytes);
    end->room = end->staged ? bytes : 0;
    return end->staged ? NULL : fail(api, "out of memory");
}

/* The number types of NCCL, by those of ONNX; -1 where it has none. */
static int nccl_type(int type) {
    switch (type) {
        case ORT_INT8: return 0;
        case ORT_UINT8: return 1;
        case ORT_INT32: return 2;
        case ORT_UINT32: return 3;
        case ORT_INT64: return 4;
        case ORT_FLOAT16: return 6;
        case ORT_FLOAT: return 7;
        case ORT_DOUBLE: return 8;
        case ORT_BFLOAT16: return 9;
        default: return -1;
    }
}

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
    if (nccl_type(type) < 0) return fail(kernel->api, "NCCL has no such number type");
    int operation = kernel->number == MAX ? 2 : 0;
    int status = kernel->end->nccl(in, out, count, nccl_type(type), operation, kernel->end->communicator, stream);
    if (!status) return NULL;
    snprintf(message, sizeof message, "NCCL's all-reduce failed with error %d", status);
    return fail(kernel->api, message);
}

static OrtStatus* reduce_on_host(Kernel* kernel, int type, const void* in, void* out, size_t count) {
    Member* member = &kernel->end->member;
    char message[MESSAGE];
    int who = -1;
    if (!number_bytes(type)) return fail(kernel->api, "the sum over ranks has no such number type");
    switch (meeting_all_reduce(member, (int)kernel->number, type, in, out, count, &who)) {
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
    TRY(make_room(kernel->api, end, bytes));
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

OrtStatus* make_kernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, const char* attribute,
                       void** made) {
    const Operator* own = (const Operator*)op;
    Kernel* kernel = calloc(1, sizeof *kernel);
    OrtStatus* status = NULL;
    *made = NULL;
    if (!kernel) return fail(api, "out of memory");
    *kernel = (Kernel){.api = api, .end = own->end, .on_gpu = own->on_gpu};
    if (attribute) status = ORT(api, KernelInfoGetAttribute_int64)(info, attribute, &kernel->number);
    if (status) return free(kernel), status;
    if (own->end) atomic_fetch_add(&own->end->users, 1);
    *made = kernel;
    return NULL;
}

static OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** made) {
    const Operator* own = (const Operator*)op;
    if (own->end) own->end->sums = 1;
    return make_kernel(op, api, info, "operation", made);
}

static const char* name(const OrtCustomOp* op) { return (void)op, "AllReduce"; }
static const char* half_name(const OrtCustomOp* op) { return (void)op, "AllReduceHalf"; }
static size_t two(const OrtCustomOp* op) { return (void)op, 2; }
static int type_of(const OrtCustomOp* op, size_t index) { return (void)op, index ? ORT_UINT8 : ORT_UNDEFINED; }
static int half_type_of(const OrtCustomOp* op, size_t index) { return (void)op, index ? ORT_UINT8 : ORT_FLOAT16; }
static int needed(const OrtCustomOp* op, size_t index) { return (void)op, index ? ORT_OPTIONAL : ORT_REQUIRED; }

void init_value_and_token(Operator* made) {
    made->op.GetInputType = made->op.GetOutputType = type_of;
    made->op.GetInputTypeCount = made->op.GetOutputTypeCount = two;
    made->op.GetInputCharacteristic = made->op.GetOutputCharacteristic = needed;
}

void take_halves(Operator* made) { made->op.GetInputType = made->op.GetOutputType = half_type_of; }

size_t first_is_first(int** inputs, int** outputs) {
    *inputs = calloc(1, sizeof **inputs);
    *outputs = calloc(1, sizeof **outputs);
    return *inputs && *outputs;
}

static void init_all_reduce(Operator* made) {
    init_value_and_token(made);
    made->op.GetName = name;
    made->op.CreateKernelV2 = create;
    made->op.KernelComputeV2 = compute;
    made->op.GetMayInplace = first_is_first;
}

static void init_all_reduce_half(Operator* made) {
    init_all_reduce(made);
    made->op.GetName = half_name;
    take_halves(made);
}

/* An end goes after the last engine that has it: outputs keep engines alive after whoever has made the end. */
static void release(End* end) {
    if (!end || atomic_fetch_sub(&end->users, 1) != 1) return;
    if (end->domain) ORT(end->api, ReleaseCustomOpDomain)(end->domain);
    free(end->staged);
    free(end);
}

static void destroy(void* made) {
    Kernel* kernel = made;
    release(kernel->end);
    free(kernel);
}

static const char* provider(const OrtCustomOp* op) {
    return ((const Operator*)op)->on_gpu ? "CUDAExecutionProvider" : "CPUExecutionProvider";
}
static int memory(const OrtCustomOp* op, size_t index) { return (void)op, (void)index, ORT_DEFAULT_MEMORY; }
static int yes(const OrtCustomOp* op) { return (void)op, 1; }
static int no(const OrtCustomOp* op) { return (void)op, 0; }
static int last(const OrtCustomOp* op) { return (void)op, 0x7fffffff; }
static size_t no_places(int** inputs, int** outputs) { return (void)inputs, (void)outputs, 0; }
static void release_places(int* inputs, int* outputs) {
    free(inputs);
    free(outputs);
}

/* What all operators have in common. */
static void init_operator(Operator* made, int on_gpu, End* end) {
    made->on_gpu = on_gpu;
    made->end = end;
    made->op.version = ORT_VERSION;
    made->op.GetExecutionProviderType = provider;
    made->op.KernelDestroy = destroy;
    made->op.GetInputMemoryType = memory;
    made->op.GetVariadicInputMinArity = yes;
    made->op.GetVariadicInputHomogeneity = no;
    made->op.GetVariadicOutputMinArity = yes;
    made->op.GetVariadicOutputHomogeneity = yes;
    made->op.GetStartVersion = yes;
    made->op.GetEndVersion = last;
    made->op.GetMayInplace = made->op.GetAliasMap = no_places;
    made->op.ReleaseMayInplace = made->op.ReleaseAliasMap = release_places;
}

EXPORT int splitc_interface(void) { return INTERFACE; }

/* Make an end's operators, once. */
static OrtStatus* make_domain(End* end, const OrtApi* api) {
    if (end->domain) return NULL;
    static void (*const kinds[])(Operator*) = {init_all_reduce, init_all_reduce_half, init_send, init_receive,
                                               init_send_half,  init_receive_half,    init_after};
    OrtCustomOpDomain* domain;
    end->api = api;
    TRY(ORT(api, CreateCustomOpDomain)("splitc", &domain));
    for (int number = 0; number < OPERATORS; number++) {
        Operator* made = &end->operators[number];
        init_operator(made, number % 2, registered);
        kinds[number / 2](made);
        OrtStatus* status = ORT(api, CustomOpDomain_Add)(domain, &made->op);
        if (status) {
            ORT(api, ReleaseCustomOpDomain)(domain);
            return status;
        }
    }
    end->domain = domain;
    return NULL;
}

/* What ONNX Runtime calls. Of a thread that has named no end, operators that can be loaded and not be run: all such threads
 * have these together, and may come at the same time. */
EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
    static End none;
    static atomic_flag making = ATOMIC_FLAG_INIT;
    const OrtApi* api = base->GetApi(ORT_VERSION);
    End* end = registered ? registered : &none;
    while (atomic_flag_test_and_set(&making)) {
    }
    OrtStatus* status = make_domain(end, api);
    atomic_flag_clear(&making);
    return status ? status : ORT(api, AddCustomOpDomain)(options, end->domain);
}

/* A rank's end of a meeting: `meeting` is memory for it. NULL where there is no memory left. */
EXPORT End* splitc_end_of_meeting(Meeting* meeting, int rank, double patience) {
    End* end = calloc(1, sizeof *end);
    if (!end) return NULL;
    end->users = 1;
    end->member = (Member){.meeting = meeting, .rank = rank, .patience = patience};
    return end;
}

/* A rank's end of a communicator of NCCL's, which may be given later. */
EXPORT End* splitc_end_of_nccl(NcclAllReduce all_reduce) {
    End* end = calloc(1, sizeof *end);
    if (!end) return NULL;
    end->users = 1;
    end->nccl = all_reduce;
    return end;
}

/* Who has made an end needs it no more. */
EXPORT void splitc_end_release(End* end) { release(end); }

/* Without an engine: as the operator does it. */
EXPORT int splitc_kernel_sum(const KernelSums* sums, int type, const void* in, void* out, size_t bytes, void* stream) {
    return kernel_sum(sums, type, in, out, bytes, stream);
}

/* The communicator of an end of NCCL's, and kernels for sums, or NULL. */
EXPORT void splitc_end_connect(End* end, void* communicator, const KernelSums* sums) {
    end->communicator = communicator, end->sums_by_kernels = sums;
}

/* Let an end of a communicator of NCCL's send and receive too. The ranks agree on it in a meeting. */
EXPORT void splitc_end_transfers(End* end, Meeting* meeting, int rank, double patience, NcclSend send,
                                 NcclReceive receive) {
    end->member = (Member){.meeting = meeting, .rank = rank, .patience = patience};
    end->nccl_send = send, end->nccl_receive = receive;
}

/* Let a GPU come to the end's meeting. */
EXPORT void splitc_end_on_gpu(End* end, CopyAsync copy, Synchronize synchronize) {
    end->copy = copy, end->synchronize = synchronize;
}

/* The end that operators get which are registered on this thread from now on; NULL for none. */
EXPORT void splitc_end_register(End* end) { registered = end; }

EXPORT void splitc_begin(End* end, uint64_t run) { meeting_begin(&end->member, run); }

/* Returns whether the others' collectives then fail at once: those of NCCL's that sum can't be told. */
EXPORT int splitc_fail(End* end, uint64_t run) {
    if (end->member.meeting) meeting_fail(&end->member, run);
    return !(end->nccl && (end->sums || !end->member.meeting));
}

EXPORT size_t splitc_meeting_bytes(int ranks, size_t staging) { return meeting_bytes(ranks, staging); }
EXPORT void splitc_meeting_init(Meeting* meeting, int ranks, size_t staging) { meeting_init(meeting, ranks, staging); }
EXPORT void splitc_meeting_set_cores(Meeting* meeting, int cores) { meeting_set_cores(meeting, cores); }
EXPORT void splitc_meeting_init_post(Meeting* meeting, int ranks, const Post* post) {
    meeting_init_post(meeting, ranks, post);
}
EXPORT void splitc_meeting_abort(Meeting* meeting) { meeting_abort(meeting); }

/* Without an engine: as the operator does it. Returns what meeting_all_reduce does. */
EXPORT int splitc_all_reduce(End* end, int operation, int type, const void* in, void* out, size_t count) {
    int who = -1;
    return meeting_all_reduce(&end->member, operation, type, in, out, count, &who);
}
