# What each layer of csrc/ may include. Run with -DSOURCE_DIR=<repository> -P.
# A rule is a folder, a pattern of includes that it must not have, and exceptions to the folder.
set(faults "")

function(forbid folder what pattern)
  file(GLOB_RECURSE sources "${SOURCE_DIR}/csrc/${folder}/*.h" "${SOURCE_DIR}/csrc/${folder}/*.cpp"
    "${SOURCE_DIR}/csrc/${folder}/*.cu" "${SOURCE_DIR}/csrc/${folder}/*.cuh")
  if(NOT sources)
    message(FATAL_ERROR "csrc/${folder} has no sources: a rule of check_layers.cmake checks nothing")
  endif()
  foreach(source IN LISTS sources)
    file(RELATIVE_PATH name "${SOURCE_DIR}" "${source}")
    if(ARGN AND name MATCHES "^csrc/(${ARGN})/")
      continue()
    endif()
    file(STRINGS "${source}" lines REGEX "^[ \t]*#[ \t]*include[ \t]*[<\"](${pattern})")
    foreach(line IN LISTS lines)
      string(APPEND faults "\n  ${name}: ${what}: ${line}")
    endforeach()
  endforeach()
  set(faults "${faults}" PARENT_SCOPE)
endfunction()

set(torch "torch/|ATen/|c10/|aten/|caffe2/")
set(cute "cute/|cutlass/")
set(cuda "cuda|driver_types|vector_types|${cute}")

forbid("." "only csrc/torch may know torch" "${torch}" "torch")
forbid("." "only csrc/sm80 may know CuTe" "${cute}" "sm80")
forbid(core "shared logic is plain C++" "${cuda}|thread|mutex|atomic|sm80/|cpu/|torch/")
forbid(include "the C++ API needs no other header" "${cuda}|core/|sm80/|cpu/")
forbid(cpu "the CPU backend knows no CUDA" "${cuda}|sm80/")
forbid(torch "the binding knows the C++ API only" "${cute}|cuda|sm80/|cpu/")
forbid(sm80 "a kernel family knows the shared logic only" "cpu/|thread")

if(faults)
  message(FATAL_ERROR "Includes that cross a layer:${faults}")
endif()
message(STATUS "No include crosses a layer")
