#include "transfer_operators.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "combine.h"
#include "transfers.h"

enum { NCCL_UINT8 = 1 };

static size_t bytes_of(const Head* head) {
    size_t bytes = number_type(head->type)->bytes;
    for (int axis = 0; axis < head->axes; axis++) bytes *= (size_t)head->sizes[axis];
    return bytes;
}

static OrtStatus* read_head(const OrtApi* api, const OrtValue* value, Head* head) {
    OrtTensorTypeAndShapeInfo* info;
    size_t axes = 0;
    int type = ORT_UNDEFINED;
    TRY(ORT(api, GetTensorTypeAndShape)(value, &info));
    OrtStatus* status = ORT(api, GetDimensionsCount)(info, &axes);
    if (!status && axes > MOST_AXES) status = fail(api, "a value that is sent has too many axes");
    if (!status) status = ORT(api, GetDimensions)(info, head->sizes, axes);
    if (!status) status = ORT(api, GetTensorElementType)(info, &type);
    ORT(api, ReleaseTensorTypeAndShapeInfo)(info);
    head->type = type, head->axes = (int32_t)axes;
    if (!status && !number_type(type)->bytes) status = fail(api, "a value of this type can't be sent");
    return status;
}

/* The error of a transfer that did not take place; NULL where it did. */
static OrtStatus* check(const Kernel* kernel, int result, const char* what) {
    const Member* member = &kernel->end->member;
    char message[MESSAGE];
    if (result == MEETING_OK) return NULL;
    if (result == MEETING_APART) return fail(kernel->api, APART);
    if (result != MEETING_LATE) return fail(kernel->api, "another rank failed, and a transfer between ranks was given up");
    snprintf(message, sizeof message, "rank %d did not %s a value within %.0f s", (int)kernel->number, what,
             member->patience);
    return fail(kernel->api, message);
}

static OrtStatus* check_nccl(const Kernel* kernel, int status, const char* what) {
    char message[MESSAGE];
    if (!status) return NULL;
    snprintf(message, sizeof message, "NCCL's %s failed with error %d", what, status);
    return fail(kernel->api, message);
}

static OrtStatus* check_end(const Kernel* kernel) {
    const End* end = kernel->end;
    if (!end) return fail(kernel->api, "this engine was loaded without the ranks that it sends to and receives from");
    int fits = end->member.meeting && (kernel->on_gpu ? end->copy || end->nccl : !end->nccl);
    if (!fits) return fail(kernel->api, "this transfer between ranks is for another kind of device");
    int known = kernel->number >= 0 && kernel->number < end->member.meeting->ranks;
    return known ? NULL : fail(kernel->api, "this transfer is with a rank that is not there");
}

/* Two GPUs that NCCL connects agree on the host before both take part, so that none waits for one that has failed. */
static OrtStatus* send_by_nccl(Kernel* kernel, const Head* head, const void* value, void* stream) {
    End* end = kernel->end;
    int peer = (int)kernel->number;
    Head answer;
    TRY(check(kernel, transfer_send(&end->member, peer, head, NULL, 0), "receive"));
    TRY(check(kernel, transfer_await(&end->member, peer, &answer), "receive"));
    TRY(check(kernel, transfer_take(&end->member, peer, NULL, 0), "receive"));
    if (!bytes_of(head)) return NULL;
    int status = end->nccl_send(value, bytes_of(head), NCCL_UINT8, peer, end->communicator, stream);
    return check_nccl(kernel, status, "send");
}

static OrtStatus* receive_by_nccl(Kernel* kernel, const Head* head, void* value, void* stream) {
    End* end = kernel->end;
    int peer = (int)kernel->number;
    TRY(check(kernel, transfer_take(&end->member, peer, NULL, 0), "send"));
    TRY(check(kernel, transfer_send(&end->member, peer, head, NULL, 0), "send"));
    if (!bytes_of(head)) return NULL;
    int status = end->nccl_receive(value, bytes_of(head), NCCL_UINT8, peer, end->communicator, stream);
    return check_nccl(kernel, status, "receive");
}

/* Between GPUs that NCCL does not connect. */
static OrtStatus* send_by_host(Kernel* kernel, const Head* head, const void* value, void* stream) {
    End* end = kernel->end;
    size_t bytes = bytes_of(head);
    TRY(reserve_staging(kernel->api, end, bytes));
    if (bytes && (end->copy(end->staged, value, bytes, COPY_DEFAULT, stream) || end->synchronize(stream)))
        return fail(kernel->api, "the GPU failed before a value was sent");
    return check(kernel, transfer_send(&end->member, (int)kernel->number, head, end->staged, bytes), "receive");
}

static OrtStatus* receive_by_host(Kernel* kernel, const Head* head, void* value, void* stream) {
    End* end = kernel->end;
    size_t bytes = bytes_of(head);
    TRY(reserve_staging(kernel->api, end, bytes));
    TRY(check(kernel, transfer_take(&end->member, (int)kernel->number, end->staged, bytes), "send"));
    if (bytes && (end->copy(value, end->staged, bytes, COPY_DEFAULT, stream) || end->synchronize(stream)))
        return fail(kernel->api, "the GPU failed after a value was received");
    return NULL;
}

static OrtStatus* give_token(const OrtApi* api, OrtKernelContext* context, size_t output) {
    int64_t one = 1;
    OrtValue* token;
    return ORT(api, KernelContext_GetOutput)(context, output, &one, 1, &token);
}

static OrtStatus* send(void* self, OrtKernelContext* context) {
    Kernel* kernel = self;
    const OrtApi* api = kernel->api;
    const OrtValue* value;
    OrtValue* given;
    Head head;
    void *in, *out, *stream = NULL;
    TRY(check_end(kernel));
    TRY(ORT(api, KernelContext_GetInput)(context, 0, &value));
    TRY(read_head(api, value, &head));
    TRY(ORT(api, KernelContext_GetOutput)(context, 0, head.sizes, (size_t)head.axes, &given));
    TRY(give_token(api, context, 1));
    TRY(ORT(api, GetTensorMutableData)((OrtValue*)value, &in));
    TRY(ORT(api, GetTensorMutableData)(given, &out));
    if (in != out) return fail(api, "a value that is sent was moved"); /* ONNX Runtime was told that it is the same one */
    if (kernel->on_gpu) TRY(ORT(api, KernelContext_GetGPUComputeStream)(context, &stream));
    if (!kernel->on_gpu)
        return check(kernel, transfer_send(&kernel->end->member, (int)kernel->number, &head, in, bytes_of(&head)), "receive");
    return kernel->end->copy ? send_by_host(kernel, &head, in, stream) : send_by_nccl(kernel, &head, in, stream);
}

static OrtStatus* receive(void* self, OrtKernelContext* context) {
    Kernel* kernel = self;
    const OrtApi* api = kernel->api;
    const OrtValue* like;
    OrtValue* made;
    Head head, wanted;
    void *out, *stream = NULL;
    TRY(check_end(kernel));
    TRY(ORT(api, KernelContext_GetInput)(context, 0, &like));
    TRY(read_head(api, like, &wanted));
    TRY(check(kernel, transfer_await(&kernel->end->member, (int)kernel->number, &head), "send"));
    if (head.type != wanted.type) return fail(api, "another rank sends another type than is received");
    TRY(ORT(api, KernelContext_GetOutput)(context, 0, head.sizes, (size_t)head.axes, &made));
    TRY(give_token(api, context, 1));
    TRY(ORT(api, GetTensorMutableData)(made, &out));
    if (kernel->on_gpu) TRY(ORT(api, KernelContext_GetGPUComputeStream)(context, &stream));
    if (!kernel->on_gpu)
        return check(kernel, transfer_take(&kernel->end->member, (int)kernel->number, out, bytes_of(&head)), "send");
    return kernel->end->copy ? receive_by_host(kernel, &head, out, stream) : receive_by_nccl(kernel, &head, out, stream);
}

static OrtStatus* after(void* self, OrtKernelContext* context) {
    return give_token(((Kernel*)self)->api, context, 0);
}

static OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** made) {
    return make_kernel(op, api, info, NULL, made);
}

static OrtStatus* create_with_peer(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** made) {
    return make_kernel(op, api, info, "peer", made);
}

static size_t one(const OrtCustomOp* op) { return (void)op, 1; }
static int token(const OrtCustomOp* op, size_t index) { return (void)op, (void)index, ORT_UINT8; }
static int any_type(const OrtCustomOp* op, size_t index) { return (void)op, (void)index, ORT_UNDEFINED; }
static int all(const OrtCustomOp* op, size_t index) { return (void)op, (void)index, ORT_VARIADIC; }
static int required(const OrtCustomOp* op, size_t index) { return (void)op, (void)index, ORT_REQUIRED; }

/* The value that a Receive takes is one of the type that it makes. */
static void init_transfer(Operator* made) {
    init_value_and_token(made);
    made->op.CreateKernelV2 = create_with_peer;
}

void init_send(Operator* made) {
    init_transfer(made);
    made->op.KernelComputeV2 = send;
    made->op.GetAliasMap = first_is_first;
}

void init_receive(Operator* made) {
    init_transfer(made);
    made->op.KernelComputeV2 = receive;
}

void init_after(Operator* made) {
    made->op.GetInputType = any_type;
    made->op.GetInputTypeCount = one;
    made->op.GetInputCharacteristic = all;
    made->op.GetOutputType = token;
    made->op.GetOutputTypeCount = one;
    made->op.GetOutputCharacteristic = required;
    made->op.CreateKernelV2 = create;
    made->op.KernelComputeV2 = after;
}
