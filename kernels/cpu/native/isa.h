// What the ops need from outside. Nothing here may define a function that several translation units share: the linker
// would keep one copy, compiled for whichever instruction set came first.
#pragma once

#include <math.h>
#include <string.h>

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common.h"
