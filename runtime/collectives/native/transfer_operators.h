/* The operators by which engines of ranks send values to each other: splitc.Send, splitc.Receive and splitc.After.
 *
 * A rank's transfers are chained by tokens: each takes the token of the one before it. A Send gives its value on, so that
 * what reads it there comes after it. After gives a token once all of its inputs are computed. */
#ifndef SPLITC_TRANSFER_OPERATORS_H
#define SPLITC_TRANSFER_OPERATORS_H

#include "operator.h"

/* Make an operator, of which what is common is set, one of these. */
void init_send(Operator* made);
void init_receive(Operator* made);
void init_after(Operator* made);

#endif
