/* What the operators have in common: the end of a rank, and what ONNX Runtime knows of an operator. */
#ifndef SPLITC_OPERATOR_H
#define SPLITC_OPERATOR_H

#include <stdatomic.h>

#include "kernel_sums.h"
#include "meeting.h"
#include "ort_api.h"

#define MESSAGE 256
#define APART "ranks were not given the same requests"
/* Seven kinds, each on the CPU and on CUDA devices. */
#define OPERATORS 14

/* NCCL's ncclAllReduce, ncclSend and ncclRecv, which are looked up by who has loaded NCCL. */
typedef int (*NcclAllReduce)(const void* in, void* out, size_t count, int type, int operation, void* communicator,
                             void* stream);
typedef int (*NcclSend)(const void* value, size_t count, int type, int peer, void* communicator, void* stream);
typedef int (*NcclReceive)(void* value, size_t count, int type, int peer, void* communicator, void* stream);

/* CUDA's cudaMemcpyAsync and cudaStreamSynchronize, likewise. */
typedef int (*CopyAsync)(void* to, const void* from, size_t bytes, int kind, void* stream);
typedef int (*Synchronize)(void* stream);
enum { COPY_DEFAULT = 4 }; /* cudaMemcpyDefault: by the addresses */

struct End;

/* An operator of one engine, with the end that its kernels use. */
typedef struct Operator {
    OrtCustomOp op;
    const char* name;
    int on_gpu;
    struct End* end;
} Operator;

/* A rank's end: of a meeting on the host, or of a communicator of NCCL's. A GPU comes to a meeting by copies to the host.
 * GPUs that NCCL connects tell each other by a meeting what they are about to send. The end keeps what ONNX Runtime was
 * given. */
typedef struct End {
    _Atomic int users; /* who made it, and the kernels: the last one that goes frees it */
    Member member;
    NcclAllReduce nccl;
    NcclSend nccl_send;
    NcclReceive nccl_receive;
    void* communicator;
    const KernelSums* sums_by_kernels; /* where GPUs can write to each other's memory, or NULL */
    int sums; /* whether an engine has all-reduces */
    CopyAsync copy;
    Synchronize synchronize;
    void* staged;
    size_t staged_bytes;
    int oversized; /* how often in a row far fewer bytes were needed */
    Operator operators[OPERATORS];
    const OrtApi* api;
    OrtCustomOpDomain* domain;
} End;

/* A kernel of an operator. `number` is its attribute: what an all-reduce does, or a transfer's peer. */
typedef struct Kernel {
    const OrtApi* api;
    End* end;
    int on_gpu;
    int64_t number;
} Kernel;

#define TRY(call)                      \
    do {                               \
        OrtStatus* status_ = (call);   \
        if (status_) return status_;   \
    } while (0)

static inline OrtStatus* fail(const OrtApi* api, const char* message) {
    return ORT(api, CreateStatus)(ORT_FAIL, message);
}

/* Have this many bytes of the host's memory at `end->staged`. */
OrtStatus* reserve_staging(const OrtApi* api, End* end, size_t bytes);

/* Drop a reference to an end, which may be NULL. */
void release_end(End* end);

/* Make a kernel, whose number is the attribute of this name, or none. */
OrtStatus* make_kernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, const char* attribute,
                       void** made);

/* What all operators have in common. */
void init_operator(Operator* made, const char* name, int on_gpu, End* end);
/* Set what operators have in common that take and give a value and, optionally, a token: another one came before. */
void init_value_and_token(Operator* made);
/* The value is in half precision, and never in another one. */
void take_halves(Operator* made);
/* For ONNX Runtime: the first input and the first output may share memory. */
size_t first_is_first(int** inputs, int** outputs);

#endif
