// What every attention kernel does: its parts, their keys and values, the main loop, the epilogue.
#pragma once

#include "sm80/epilogue.h"
#include "sm80/kv_feed.h"
#include "sm80/mainloop.h"

namespace flashattn::sm80 {

template <class Traits, class Source, class Parts>
CUTE_DEVICE void attend(FlashFwdParams const& params, Source const& source, Parts const& parts,
                        typename Traits::SharedStorage& smem) {
  KvFeed<Traits, Source, Parts> feed(source, parts, smem.parts);
  Mainloop<Traits> mainloop(params, smem);
  mainloop.run(feed, [&](Part const& part, auto& acc, auto& softmax, auto& stage) {
    Epilogue<Traits>(params, part).store(acc, softmax, smem, stage);
  });
}

}  // namespace flashattn::sm80
