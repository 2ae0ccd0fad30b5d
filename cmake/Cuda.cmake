# Decides whether the CUDA kernels are built, and checks that they can be.
# Sets FLASHATTN_CUDA_ENABLED, and completes FLASHATTN_ARCHS and FLASHATTN_PTX_ARCH.
include(CheckLanguage)

if(NOT FLASHATTN_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FLASHATTN_CUDA: expected AUTO, ON or OFF, got ${FLASHATTN_CUDA}")
endif()

set(FLASHATTN_CUDA_ENABLED OFF)
if(FLASHATTN_CUDA STREQUAL OFF)
  if(NOT FLASHATTN_CUDA_OFF_REASON)
    set(FLASHATTN_CUDA_OFF_REASON "FLASHATTN_CUDA=OFF was set at build time")
  endif()
else()
  if(NOT CMAKE_CUDA_COMPILER AND NOT "$ENV{CUDA_HOME}" STREQUAL "")
    if(NOT EXISTS "$ENV{CUDA_HOME}/bin/nvcc")
      message(FATAL_ERROR "CUDA_HOME=$ENV{CUDA_HOME} has no bin/nvcc. Unset it or correct it.")
    endif()
    set(CMAKE_CUDA_COMPILER "$ENV{CUDA_HOME}/bin/nvcc")
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(FLASHATTN_CUDA_ENABLED ON)
    set(FLASHATTN_CUDA_OFF_REASON "")  # one of an earlier configuration may be cached
  elseif(FLASHATTN_CUDA STREQUAL ON)
    message(FATAL_ERROR "FLASHATTN_CUDA=ON, but nvcc was not found or does not work. "
      "Install the CUDA toolkit and set CUDA_HOME, or choose FLASHATTN_CUDA=OFF.")
  elseif(NOT FLASHATTN_CUDA_OFF_REASON)
    set(FLASHATTN_CUDA_OFF_REASON "nvcc was not found at build time")
  endif()
endif()

# Every architecture gets machine code; the one in FLASHATTN_PTX_ARCH also PTX.
# The architectures of a target's kernels, as machine code; the newest one also as PTX.
function(flashattn_target_archs target)
  set(architectures "")
  foreach(arch IN LISTS ARGN)
    if(arch STREQUAL FLASHATTN_PTX_ARCH)
      list(APPEND architectures ${arch})
    else()
      list(APPEND architectures ${arch}-real)
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  target_compile_options(${target} PRIVATE --expt-relaxed-constexpr)
endfunction()

if(NOT FLASHATTN_CUDA_ENABLED)
  message(STATUS "CUDA kernels: none (${FLASHATTN_CUDA_OFF_REASON})")
  return()
endif()

list(REMOVE_DUPLICATES FLASHATTN_ARCHS)
list(SORT FLASHATTN_ARCHS COMPARE NATURAL)
foreach(arch IN LISTS FLASHATTN_ARCHS)
  if(NOT arch MATCHES "^[0-9]+$" OR arch LESS 80)
    message(FATAL_ERROR "FLASHATTN_ARCHS: expected numbers from 80 on such as 80;90, got ${arch}")
  endif()
endforeach()
if(NOT FLASHATTN_PTX_ARCH)
  list(GET FLASHATTN_ARCHS -1 FLASHATTN_PTX_ARCH)
endif()
if(NOT FLASHATTN_PTX_ARCH IN_LIST FLASHATTN_ARCHS)
  message(FATAL_ERROR "FLASHATTN_PTX_ARCH: expected one of ${FLASHATTN_ARCHS}, got ${FLASHATTN_PTX_ARCH}")
endif()

list(REMOVE_DUPLICATES FLASHATTN_HEAD_DIMS)
list(SORT FLASHATTN_HEAD_DIMS COMPARE NATURAL)
foreach(dim IN LISTS FLASHATTN_HEAD_DIMS)
  if(NOT dim MATCHES "^(32|64|96|128|160|192|224|256)$")
    message(FATAL_ERROR "FLASHATTN_HEAD_DIMS: expected some of 32 64 96 128 160 192 224 256, got ${dim}")
  endif()
endforeach()

# The targets set their own architectures.
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit REQUIRED)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}) is too old: "
    "12.0 or newer is needed for C++20.")
endif()
if(NOT EXISTS "${FLASHATTN_CUTLASS_INCLUDE}/cute/tensor.hpp")
  message(FATAL_ERROR "The CUTLASS headers were not found. Install them (pip install nvidia-cutlass), "
    "or set CUTLASS_PATH to a CUTLASS checkout.")
endif()
message(STATUS "CUDA kernels: architectures ${FLASHATTN_ARCHS} (PTX of ${FLASHATTN_PTX_ARCH}), "
  "head dims ${FLASHATTN_HEAD_DIMS}, nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
