# Writes _build_info.json, which `python -m flashattn_ext.info` reads.
set(info_archs "")
set(info_head_dims "")
set(info_cuda_version "")
set(info_ptx_arch 0)
if(FLASHATTN_CUDA_ENABLED)
  list(JOIN FLASHATTN_ARCHS ", " info_archs)
  list(JOIN FLASHATTN_HEAD_DIMS ", " info_head_dims)
  set(info_ptx_arch ${FLASHATTN_PTX_ARCH})
  set(info_cuda_version "${CMAKE_CUDA_COMPILER_VERSION}")
endif()

set(info_git_commit "")
find_program(GIT_EXECUTABLE git)
if(GIT_EXECUTABLE AND EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/.git")
  execute_process(COMMAND "${GIT_EXECUTABLE}" rev-parse --short HEAD
    WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}"
    OUTPUT_VARIABLE info_git_commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

configure_file("${CMAKE_CURRENT_LIST_DIR}/build_info.json.in"
  "${CMAKE_CURRENT_BINARY_DIR}/_build_info.json" @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/_build_info.json"
  DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
