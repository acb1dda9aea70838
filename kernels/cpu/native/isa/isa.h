// External headers that the ops need, all included before BEGIN_TARGET. The linker keeps only one copy of a function
// that several translation units share, so shared functions must be compiled for any machine.
#pragma once

#include <math.h>
#include <string.h>

#include <type_traits>
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
