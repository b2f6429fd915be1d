/* Operators of an engine on a GPU that are kernels of our own: splitc.fused.*, by runtime/engines/fused_source.py. */
#ifndef SPLITC_FUSED_OPERATORS_H
#define SPLITC_FUSED_OPERATORS_H

#include "operator.h"

#define FUSED_NAME 64
#define FUSED_INPUTS 12

/* A kernel, as Python describes it (runtime/engines/fused_kernels.py).
 *
 * Inputs are rows of `widths` numbers: integers where the bit of the input is set in `integers`, and otherwise of `type`
 * (ONNX's code), as the output. Where it is set in `whole`, the input has a row for each of the output, and where it is set
 * in `looked_up`, any number of rows; other inputs have a number that divides the output's. A block of `threads` computes
 * `rows` rows of `columns` numbers. */
typedef struct FusedKernel {
    char name[FUSED_NAME];
    void* function;
    int type;
    unsigned inputs, integers, whole, looked_up, columns, rows, threads;
    unsigned widths[FUSED_INPUTS];
} FusedKernel;

typedef struct FusedOperators FusedOperators;

/* The operators of these kernels; NULL where there is no memory left. */
FusedOperators* make_fused(const FusedKernel* kernels, int count, int on_gpu, LaunchKernel launch);
/* Add the operators to a session. */
OrtStatus* add_fused(FusedOperators* all, const OrtApi* api, OrtSessionOptions* options);
/* Drop a reference to operators, which may be NULL. */
void release_fused(FusedOperators* all);

#endif
