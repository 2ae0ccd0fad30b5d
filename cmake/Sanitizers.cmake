# FLASHATTN_SANITIZE and FLASHATTN_COVERAGE instrument everything that is compiled from here on.
if(FLASHATTN_SANITIZE)
  if(FLASHATTN_CUDA_ENABLED)
    message(FATAL_ERROR "FLASHATTN_SANITIZE=${FLASHATTN_SANITIZE} needs FLASHATTN_CUDA=OFF: it "
      "instruments host code only. compute-sanitizer looks at kernels (tests/sanitize_gpu.py).")
  endif()
  add_compile_options(-fsanitize=${FLASHATTN_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${FLASHATTN_SANITIZE})
endif()
if(FLASHATTN_COVERAGE)
  if(FLASHATTN_CUDA_ENABLED)
    message(FATAL_ERROR "FLASHATTN_COVERAGE needs FLASHATTN_CUDA=OFF: gcov counts lines of host code only.")
  endif()
  add_compile_options(--coverage -O1)  # -O0 would take the tests ten times as long
  add_link_options(--coverage)
endif()
