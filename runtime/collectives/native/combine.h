/* Sums and greatest numbers of arrays, element by element. */
#ifndef SPLITC_COMBINE_H
#define SPLITC_COMBINE_H

#include <stddef.h>

enum { SUM = 0, MAX = 1 };

/* Bytes of a number of this ONNX type; 0 where it can't be combined. */
size_t number_bytes(int type);

/* Combine `count` arrays of `ranks` ranks, in their order, from element `first` to before `last`, and write the result to
 * the same elements of all `outputs`, which may be the inputs. Half precision is added up in single precision. */
void combine(int operation, int type, int ranks, const void* const* inputs, void* const* outputs, size_t first,
             size_t last);

#endif
