/* The library of the operators in which ranks' engines meet, for ONNX Runtime, on the CPU and on CUDA devices: those of
 * reduce_operators.h and transfer_operators.h. Fused operators of GPUs are in it too (fused_operators.h).
 *
 * Values in half precision have operators of their own, as AllReduceHalf. ONNX Runtime's CPU provider computes in single
 * precision where it has no kernel for halves, and takes in what lies between such nodes if it takes both: then one rank
 * would bring other numbers than another one does.
 *
 * An engine's operators belong to one rank of one group of ranks: an `End`. ONNX Runtime asks for operators when it is given
 * this library, by `RegisterCustomOps`, on the thread that gives it; so the end is named to that thread before. */
#include <stdlib.h>

#include "all_reduce.h"
#include "fused_operators.h"
#include "kernel_sums.h"
#include "reduce_operators.h"
#include "transfer_operators.h"
#include "transfers.h"

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Of the functions and operators that this library has: raised with each change of them, here and in operator_library.py. */
#define INTERFACE 9

static _Thread_local End* registered;
static _Thread_local FusedOperators* registered_fused;

EXPORT int splitc_interface(void) { return INTERFACE; }

/* Make an end's operators, once. */
static OrtStatus* make_domain(End* end, const OrtApi* api) {
    if (end->domain) return NULL;
    static const struct {
        const char* name;
        void (*init)(Operator*);
        int halves;
    } kinds[] = {
        {"AllReduce", init_all_reduce, 0}, {"AllReduceHalf", init_all_reduce, 1}, {"Send", init_send, 0},
        {"Receive", init_receive, 0}, {"SendHalf", init_send, 1}, {"ReceiveHalf", init_receive, 1}, {"After", init_after, 0},
    };
    OrtCustomOpDomain* domain;
    end->api = api;
    TRY(ORT(api, CreateCustomOpDomain)("splitc", &domain));
    for (int number = 0; number < OPERATORS; number++) {
        Operator* made = &end->operators[number];
        init_operator(made, kinds[number / 2].name, number % 2, registered);
        kinds[number / 2].init(made);
        if (kinds[number / 2].halves) take_halves(made);
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
    if (status) return status;
    TRY(ORT(api, AddCustomOpDomain)(options, end->domain));
    return registered_fused ? add_fused(registered_fused, api, options) : NULL;
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
EXPORT void splitc_end_release(End* end) { release_end(end); }

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

/* Operators of kernels of our own, see fused_operators.h. */
EXPORT FusedOperators* splitc_fused_make(const FusedKernel* kernels, int count, int on_gpu, LaunchKernel launch) {
    return make_fused(kernels, count, on_gpu, launch);
}
/* Those that sessions get which are made on this thread from now on; NULL for none. */
EXPORT void splitc_fused_register(FusedOperators* all) { registered_fused = all; }
EXPORT void splitc_fused_release(FusedOperators* all) { release_fused(all); }

EXPORT void splitc_begin(End* end, uint64_t run) { meeting_begin(&end->member, run); }

/* Returns whether the others' collectives then fail at once: those of NCCL's that sum can't be told. */
EXPORT int splitc_fail(End* end, uint64_t run) {
    if (end->member.meeting) meeting_fail(&end->member, run);
    return !(end->nccl && (end->sums || !end->member.meeting));
}

/* Bytes of a meeting of ranks that share memory, and stage so many bytes each; of no ranks, for one with a post. */
EXPORT size_t splitc_meeting_bytes(int ranks, size_t staging) {
    return sizeof(Meeting) + transfer_bytes(ranks) + all_reduce_bytes(ranks, staging);
}
/* Make zeroed memory a meeting. To be called once, before any rank uses it. */
EXPORT void splitc_meeting_init(Meeting* meeting, int ranks, size_t staging) {
    meeting->ranks = ranks;
    meeting->staging = staging / LINE * LINE;
}
/* As above, for the meeting of a rank that shares no memory. */
EXPORT void splitc_meeting_init_post(Meeting* meeting, int ranks, const Post* post) {
    meeting->ranks = ranks;
    meeting->post = post;
}
/* Say how many cores the ranks have together: where they are more than those, none looks for long for what others do. */
EXPORT void splitc_meeting_set_cores(Meeting* meeting, int cores) { atomic_store(&meeting->bell.cores, cores); }
EXPORT void splitc_meeting_abort(Meeting* meeting) { meeting_abort(meeting); }

/* Without an engine: as the operator does it. Returns what all_reduce does. */
EXPORT int splitc_all_reduce(End* end, int operation, int type, const void* in, void* out, size_t count) {
    int who = -1;
    return all_reduce(&end->member, operation, type, in, out, count, &who);
}
