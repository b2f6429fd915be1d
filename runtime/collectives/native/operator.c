#include "operator.h"

#include <stdlib.h>

/* Memory that is so many times larger than what is needed is given back after so many times of less: as in demand.py. */
enum { WASTE = 8, RECENT = 1000 };

OrtStatus* reserve_staging(const OrtApi* api, End* end, size_t bytes) {
    end->oversized = end->staged_bytes / WASTE > bytes ? end->oversized + 1 : 0;
    if (bytes <= end->staged_bytes && end->oversized < RECENT) return NULL;
    free(end->staged);
    end->staged = malloc(bytes);
    end->staged_bytes = end->staged ? bytes : 0;
    return end->staged ? NULL : fail(api, "out of memory");
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

/* An end goes after the last engine that has it: outputs keep engines alive after whoever has made the end. */
void release_end(End* end) {
    if (!end || atomic_fetch_sub(&end->users, 1) != 1) return;
    if (end->domain) ORT(end->api, ReleaseCustomOpDomain)(end->domain);
    free(end->staged);
    free(end);
}

static void destroy(void* made) {
    Kernel* kernel = made;
    release_end(kernel->end);
    free(kernel);
}

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

static const char* name_of(const OrtCustomOp* op) { return ((const Operator*)op)->name; }
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

void init_operator(Operator* made, const char* name, int on_gpu, End* end) {
    made->name = name;
    made->on_gpu = on_gpu;
    made->end = end;
    made->op.version = ORT_VERSION;
    made->op.GetName = name_of;
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
