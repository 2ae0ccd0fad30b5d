// FA_HD marks a function that the CUDA kernels and the CPU backend both call.
#pragma once

#if defined(__CUDACC__)
#define FA_HD __host__ __device__ __forceinline__
#else
#define FA_HD inline
#endif
