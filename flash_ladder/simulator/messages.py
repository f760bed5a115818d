"""What the checker has found, in words."""

from __future__ import annotations

from .records import Party, Place

WAIT = " (cp_async_commit, later cp_async_wait)"
ENGINES = {  # who has to wait for an engine's access, and how
    "tma write": "whoever uses it must wait first for the mbarrier at which its bytes count",
    "tma read": "the thread that stores must wait for it first (bulk_commit, later bulk_wait_read)",
    "send": "the block that it is sent to must say that it has come (mbarrier_arrive_in_block)",
    "wgmma": "its warpgroup must wait for it first (wgmma_commit, later wgmma_wait)",
}
VERBS = {"read": "reads", "write": "writes", "atomic": "updates", "copy": "copies to",
         "source": "copies from", "tma write": "copies to", "tma read": "stores from",
         "send": "sends", "wgmma": "multiplies"}


def message_of(f: dict, element: str, parties: tuple[Party, ...]) -> str:
    """A finding in words."""
    kernel, sites = f["kernel"], [_where(p.place) for p in parties]
    if f["what"] in ("deadlock", "error"):
        from . import resolve_addresses
        return resolve_addresses(f["text"])
    if f["what"] == "portability":
        return (f"portability in {kernel}: {parties[0]} has returned before the others pass {f['text']} at "
                f"{parties[0].place}. GPUs since Volta do not wait for it (CUDA C++ Programming Guide: "
                "all non-exited threads); earlier ones may hang")
    if f["what"] == "barrier":
        both = ", ".join(f"{p} at {p.place}" for p in parties)
        if f["text"]:
            return (f"barrier in {kernel}: lanes of a warp that name each other in their masks meet in "
                    f"different calls of {f['text']}, {both}; all lanes of a mask must make the same call")
        return (f"barrier in {kernel}: the threads of a block wait at different ones, {both}; "
                "a __syncthreads() is for all threads of the block that have not returned")
    *others, p = parties
    of_engine = f["what"] == "copy" and p.kind in ENGINES
    if of_engine or f["what"] in ("wgmma", "accumulator", "register fence", "proxy fence"):
        return _about_engines(f, element, parties)
    if f["what"] == "race":
        q = others[0]
        if p.block != q.block and f["array"] < 0 and q.kind not in ENGINES:
            remedy = ("a block of the cluster reaches into another one: there must be a cluster_sync(), or "
                      "an mbarrier, between them")
        elif p.block != q.block and f["array"] >= 0:
            remedy = ("blocks run in any order: give each its own elements, use atomics (with "
                      "__threadfence() where one orders other accesses), or make it two kernels")
        elif q.kind in ENGINES:
            remedy = f"it may still be under way: {ENGINES[q.kind]}"
            if p.thread != q.thread:
                remedy += ", and hand that on (an mbarrier, a barrier)"
        elif q.kind in ("copy", "source") and p.thread == q.thread:
            remedy = "the copy may still be under way: the thread must wait for it first" + WAIT
        elif q.kind in ("copy", "source"):
            remedy = (f"the thread that copies must wait for its copy{WAIT}, and then a barrier must follow"
                      + _barrier_for_warp(p, q))
        elif p.place == q.place and p.kind == q.kind:
            remedy = "give each thread its own element, or use atomics, even if the values are equal"
        else:
            remedy = "there must be a barrier between them" + _barrier_for_warp(p, q)
            if p.place == q.place:
                remedy += ", in a loop between its rounds; or use atomics"
        return (f"race in {kernel} on {element}: {q} {VERBS[q.kind]} it at {sites[0]}, "
                f"{p} {VERBS[p.kind]} it at {sites[1]}, and nothing orders the two; {remedy}")
    if f["what"] == "copy":
        return (f"copy in {kernel}: {p} ends while its copy to {element} may still be under way, started "
                f"at {sites[0]}; it must wait for it first{WAIT}")
    does = f"{p} {VERBS.get(p.kind, 'takes')} "
    if f["what"] == "uninitialised" and f["text"] == "a local variable":
        does = f"{does}{element}" if element else f"{p} rounds to 16 bits"
        return (f"uninitialised in {kernel}: {does} at {sites[0]}, a value that comes from a local variable "
                "which nothing has written")
    if f["what"] == "uninitialised" and f["text"]:
        return (f"uninitialised in {kernel}: {does}{f['bytes']} bytes from {element} on at {sites[0]}, "
                "a part of which nothing has written")
    if f["what"] == "uninitialised" and not p.kind:
        return (f"uninitialised in {kernel}: {p} reads the local variable {element} at {sites[0]}, "
                "which nothing has written")
    if f["what"] == "out of bounds":
        what = element or f["text"]
        if element and "outside" not in element:
            what = f"{f['bytes']} bytes from {element} on, not all of them in its shape"
        return f"out of bounds in {kernel}: {does}{what} at {sites[0]}"
    if f["what"] == "ended block":
        return (f"ended block in {kernel}: {does}{element} at {sites[0]}, in a block of the cluster that may "
                "have ended; no block may end before the others are done with it: cluster_sync()")
    if f["what"] == "too early":
        if f["text"]:
            return (f"too early in {kernel}: {does}{element} at {sites[0]}, which a kernel ahead of the one "
                    "before it uses, and that may still run: the one before must call "
                    "wait_for_previous_kernel(), too, before it ends")
        return (f"too early in {kernel}: {does}{element} at {sites[0]}, which a kernel before it uses, and "
                "that may still run: wait_for_previous_kernel() must come first")
    if f["what"] == "misaligned":
        return (f"misaligned access in {kernel}: {does}{f['bytes']} bytes at {element} at {sites[0]}; "
                f"their address must be a multiple of {f['bytes']}")
    return f"uninitialised in {kernel}: {does}{element} at {sites[0]}, which nothing has written"


def _where(place: Place) -> str:
    return f"{place} (called at {place.callers[0]})" if place.callers else str(place)


def _barrier_for_warp(p: Party, q: Party) -> str:
    one_warp = p.thread[1:] == q.thread[1:] == (0, 0) and p.thread[0] // 32 == q.thread[0] // 32
    return " (__syncwarp() if only threads of one warp share it)" if one_warp else ""


def _about_engines(f: dict, element: str, parties: tuple[Party, ...]) -> str:
    """Of the copy engine and of wgmma, what is no race."""
    start, p = f"{f['what']} in {f['kernel']}", parties[-1]
    there, here = _where(parties[0].place), _where(p.place)
    if f["what"] == "copy":
        does = "copy to" if p.kind == "tma write" else "store from"
        return (f"{start}: the kernel ends, and the {does} {element} that {p} has started at {here} may "
                f"still be under way; {ENGINES[p.kind]}")
    if f["what"] == "wgmma":
        return (f"{start}: the kernel ends, and the product of {p}'s warpgroup at {here} may still be under "
                f"way; {ENGINES[p.kind]}")
    if f["what"] == "accumulator":
        return (f"{start}: {p} {VERBS[p.kind]} registers at {here} that the product at {there} may still add "
                f"to; {ENGINES['wgmma']}")
    if f["what"] == "register fence":
        return (f"{start}: {p} gives wgmma registers at {here} that it has used since its last "
                "wgmma_fence(); one must come between")
    return (f"{start} on {element}: {parties[0]} {VERBS[parties[0].kind]} it at {there}, {p} "
            f"{VERBS[p.kind]} it at {here}, by an engine, which may not see that yet; after the write there "
            "must be a fence_proxy_async(), and then a barrier")
