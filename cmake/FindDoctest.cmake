# Finds doctest's header and defines Doctest::doctest.

find_path(Doctest_INCLUDE_DIR NAMES doctest/doctest.h)
mark_as_advanced(Doctest_INCLUDE_DIR)

if(NOT Doctest_INCLUDE_DIR)
  message(
    FATAL_ERROR
    "The C++ tests need doctest (doctest/doctest.h), which was not found. Install it with\n"
    "  apt-get install doctest-dev    (Debian, Ubuntu)\n"
    "  dnf install doctest-devel      (Fedora, RHEL)"
  )
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Doctest REQUIRED_VARS Doctest_INCLUDE_DIR)

if(NOT TARGET Doctest::doctest)
  add_library(Doctest::doctest INTERFACE IMPORTED)
  set_target_properties(
    Doctest::doctest
    PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${Doctest_INCLUDE_DIR}"
  )
endif()
