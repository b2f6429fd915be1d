/* Sums and greatest numbers of arrays, element by element. */
#ifndef SPLITC_COMBINE_H
#define SPLITC_COMBINE_H

#include <stddef.h>

enum { SUM = 0, MAX = 1 };

/* Combine arrays of `ranks` ranks, in their order, from element `first` to before `last`, and write the result to the
 * same elements of all `outputs`, which may be the inputs. Half precision is added up in single precision. */
typedef void (*Combine)(int operation, int ranks, const void* const* inputs, void* const* outputs, size_t first,
                        size_t last);

/* Bytes of a number, 0 where they are not fixed; NCCL's code of its type; NULL where it can't be combined, nor by NCCL. */
typedef struct NumberType {
    size_t bytes;
    int nccl;
    Combine combine;
} NumberType;

/* What is known of an ONNX type: zeros if nothing is. */
const NumberType* number_type(int type);
/* Bytes of a number of this ONNX type; 0 where it can't be combined. */
size_t number_bytes(int type);

#endif
