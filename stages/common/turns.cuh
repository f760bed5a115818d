// Warpgroups that take turns. Introduced by: forward stage 24, pingpong.
#pragma once
#include "hopper.cuh"

template <int warpgroups>
struct Turns {
  int warpgroup;             // of this thread

  // --- turns
  // A named barrier a warpgroup says whose turn it is: its owner waits there, and the one before arrives. At
  // the start the last warpgroup gives warpgroup 0 its first turn. At the end it gives one that nobody needs:
  // warpgroup 0 waits for it, as no barrier should be left half full.
  __device__ __forceinline__ explicit Turns(int warpgroup) : warpgroup(warpgroup) {
    if (warpgroup == warpgroups - 1) end();
  }
  __device__ __forceinline__ void wait() const {
    if (warpgroups > 1) named_barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void end() const {
    if (warpgroups > 1) named_barrier_arrive(1 + (warpgroup + 1) % warpgroups, 256);
  }
  __device__ __forceinline__ void skip() const {       // with nothing to do in between
    wait();
    end();
  }
  __device__ __forceinline__ void end_all() const {
    if (warpgroup == 0) wait();
  }
  // ---
};
