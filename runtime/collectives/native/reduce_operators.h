/* The operator that sums over ranks: splitc.AllReduce. */
#ifndef SPLITC_REDUCE_OPERATORS_H
#define SPLITC_REDUCE_OPERATORS_H

#include "operator.h"

/* Make an operator, of which what is common is set, this one. */
void init_all_reduce(Operator* made);

#endif
