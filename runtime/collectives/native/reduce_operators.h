/* The operators that sum over ranks: splitc.AllReduce and AllReduceHalf. */
#ifndef SPLITC_REDUCE_OPERATORS_H
#define SPLITC_REDUCE_OPERATORS_H

#include "operator.h"

/* Make an operator, of which what is common is set, one of these. */
void init_all_reduce(Operator* made);
void init_all_reduce_half(Operator* made);

#endif
