"""Bytes that torch's allocator for CPUs holds in this process, counted below it: a library that is loaded before others
sees each block as it is taken and freed, by any thread. Torch itself counts none on CPUs.

    os.environ |= held.environment()    # of the process that is started; there:
    held.restart(); step(batch); held.most()
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from pathlib import Path

# Torch takes blocks by posix_memalign, at multiples of 64.
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

struct block { void *at; size_t size; struct block *next; };
static struct block *known[1 << 16];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long now, most;
static int (*take)(void **, size_t, size_t);
static void (*give)(void *);

static struct block **place(void *at) {
    struct block **found = &known[((uintptr_t)at >> 6) & 0xffff];
    while (*found && (*found)->at != at) found = &(*found)->next;
    return found;
}

int posix_memalign(void **at, size_t alignment, size_t size) {
    if (!take) take = dlsym(RTLD_NEXT, "posix_memalign");
    int failed = take(at, alignment, size);
    if (failed || alignment != 64) return failed;
    struct block *made = malloc(sizeof *made);
    pthread_mutex_lock(&lock);
    *made = (struct block){*at, size, NULL};
    *place(*at) = made;
    if ((now += size) > most) most = now;
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *at) {
    if (!give) give = dlsym(RTLD_NEXT, "free");
    struct block *gone = NULL;
    if (at && !((uintptr_t)at & 63)) {
        pthread_mutex_lock(&lock);
        struct block **found = place(at);
        if ((gone = *found)) { *found = gone->next; now -= gone->size; }
        pthread_mutex_unlock(&lock);
    }
    if (gone) give(gone);
    give(at);
}

long held_now(void) { return now; }
long held_most(void) { return most; }
void held_restart(void) { most = now; }
"""


def environment() -> dict[str, str]:
    """Return the variables for a process that counts."""
    return {"LD_PRELOAD": str(_library())}


def now() -> int:
    return _call("held_now")


def most() -> int:
    """Return the most bytes that were held since `restart`."""
    return _call("held_most")


def restart() -> None:
    _call("held_restart")


def _call(name: str) -> int:
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_long
    return int(function())


def _library() -> Path:
    made = Path(tempfile.gettempdir(), f"held_{hashlib.sha256(SOURCE.encode()).hexdigest()[:16]}.so")
    if not made.exists():
        command = ["gcc", "-shared", "-fPIC", "-O2", "-x", "c", "-", "-o", str(made), "-ldl", "-lpthread"]
        subprocess.run(command, input=SOURCE, text=True, check=True)
    return made
