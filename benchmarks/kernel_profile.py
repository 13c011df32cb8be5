"""Where the GPU's time goes, kernel by kernel. Kernels that overlap are counted in full."""

from collections.abc import Callable

import torch


def print_profile(title: str, step: Callable[[], object], count: int) -> None:
    """Runs ``step`` ``count`` times and prints microseconds a step in each kind of kernel, the longest first, and in
    none."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    times: dict[str, list[float]] = {}
    busy, covered = 0.0, float("-inf")
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        times.setdefault(event.name, []).append(end - start)
        busy += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    span = covered - min(event.time_range.start for event in kernels)
    print(f"profile of {count} steps {title}: {span / count:.0f} us a step, {(span - busy) / count:.0f} idle")
    for name, found in sorted(times.items(), key=lambda item: -sum(item[1]))[:14]:
        each = sum(found) / len(found)
        print(f"  {sum(found) / count:>8.1f} us in {len(found) / count:>5.1f} x {each:>6.1f}  {name[:80]}")
