# `cmake --install` gives a C++ project the library, its headers and find_package(flashattn).
include(CMakePackageConfigHelpers)

install(TARGETS flashattn_core EXPORT flashattn-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
install(DIRECTORY csrc/include/flashattn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp)

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashattn)
install(EXPORT flashattn-targets NAMESPACE flashattn:: DESTINATION ${config_dir} COMPONENT cpp)
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/flashattn-config.cmake.in"
  "${CMAKE_CURRENT_BINARY_DIR}/flashattn-config.cmake" INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/flashattn-config-version.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/flashattn-config.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/flashattn-config-version.cmake"
  DESTINATION ${config_dir} COMPONENT cpp)
