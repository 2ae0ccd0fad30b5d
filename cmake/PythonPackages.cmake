# Asks Python where the packages are that the build takes headers and libraries from, without
# importing any of them. Sets FLASHATTN_TORCH_DIR, FLASHATTN_TORCH_VERSION, FLASHATTN_TORCH_CUDA,
# FLASHATTN_PYBIND11_DIR and, unless it is given, FLASHATTN_CUTLASS_INCLUDE.
set(python_components Interpreter)
if(FLASHATTN_BUILD_HOST_MODULE)
  list(APPEND python_components Development.Module)
endif()
if(FLASHATTN_BUILD_TORCH OR FLASHATTN_BUILD_HOST_MODULE)
  find_package(Python 3.10 REQUIRED COMPONENTS ${python_components})
else()
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
endif()

if(Python_EXECUTABLE)
  set(search_script "${CMAKE_CURRENT_SOURCE_DIR}/build_support/packages.py")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${search_script}")
  execute_process(COMMAND "${Python_EXECUTABLE}" "${search_script}"
    OUTPUT_VARIABLE found COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" found "${found}")
  foreach(line IN LISTS found)
    string(REGEX MATCH "^([A-Z0-9_]+)=(.*)$" line "${line}")
    set(PACKAGE_${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
  endforeach()
endif()
set(FLASHATTN_TORCH_DIR "${PACKAGE_TORCH_DIR}")
set(FLASHATTN_TORCH_VERSION "${PACKAGE_TORCH_VERSION}")
set(FLASHATTN_TORCH_CUDA "${PACKAGE_TORCH_CUDA}")
set(FLASHATTN_PYBIND11_DIR "${PACKAGE_PYBIND11_DIR}")
if(NOT FLASHATTN_CUTLASS_INCLUDE)
  set(FLASHATTN_CUTLASS_INCLUDE "${PACKAGE_CUTLASS_INCLUDE}")
endif()

if(FLASHATTN_BUILD_TORCH)
  if(NOT FLASHATTN_TORCH_DIR)
    message(FATAL_ERROR "torch is not installed for ${Python_EXECUTABLE}. "
      "Install it (pip install torch), then build again.")
  elseif(FLASHATTN_TORCH_VERSION VERSION_LESS 2.10)
    message(FATAL_ERROR "torch ${FLASHATTN_TORCH_VERSION} in ${FLASHATTN_TORCH_DIR} is too old: "
      "2.10 or newer is needed.")
  endif()
endif()
if(FLASHATTN_BUILD_HOST_MODULE AND NOT FLASHATTN_PYBIND11_DIR)
  message(FATAL_ERROR "pybind11 is not installed for ${Python_EXECUTABLE}. "
    "Install it (pip install pybind11), then build again.")
endif()
