// A call over a contiguous cache, for tests of what follows from its sizes.
#pragma once

#include "flashattn/params.h"

inline flashattn::FlashSplitkvParams call(int batch, int heads, int heads_kv, int head_dim,
                                          int seqlen_q, int capacity) {
  flashattn::FlashSplitkvParams params;
  params.fwd.shape = {.batch = batch,
                      .heads = heads,
                      .heads_kv = heads_kv,
                      .head_dim = head_dim,
                      .seqlen_q = seqlen_q,
                      .seqlen_k = capacity};
  params.cache.rows = batch;
  return params;
}
