// External headers that the ops need. They are all included before BEGIN_TARGET. Functions that several translation
// units share are then compiled for any machine, since the linker keeps only one copy of each.
#pragma once

#include <math.h>
#include <string.h>

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../common.h"

// BEGIN_TARGET("avx2,fma") ... END_TARGET: functions in between are compiled for these features.
#define DO_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define BEGIN_TARGET(features) \
    DO_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET _Pragma("clang attribute pop")
#else
#define BEGIN_TARGET(features) _Pragma("GCC push_options") DO_PRAGMA(GCC target(features))
#define END_TARGET _Pragma("GCC pop_options")
#endif
