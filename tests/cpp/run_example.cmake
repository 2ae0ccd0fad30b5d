# Installs the C++ library into an empty prefix, then builds and runs examples/cpp against it as a
# stranger would. Run with -DSOURCE_DIR -DBUILD_DIR -DGENERATOR -DCXX_COMPILER -P.
set(work "${BUILD_DIR}/example")
file(REMOVE_RECURSE "${work}")

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --component cpp --prefix "${work}/prefix")
run("${CMAKE_COMMAND}" -S "${SOURCE_DIR}/examples/cpp" -B "${work}/build" -G "${GENERATOR}"
  -DCMAKE_PREFIX_PATH=${work}/prefix -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
run("${CMAKE_COMMAND}" --build "${work}/build")
foreach(example attention decode)  # with an argument, a machine with a GPU runs both ways
  run("${work}/build/${example}")
  run("${work}/build/${example}" cpu)
endforeach()
