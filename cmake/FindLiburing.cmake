# Finds liburing and defines Liburing::liburing.
#
# The static library is taken, so that what is built needs no liburing at run time. Fedora and RHEL
# package the shared one only: there a build from source uses that, for the machine it is made on.
# Set Liburing_ROOT to look in one place first, TENSORFERRY_LIBURING_ONLY_ROOT to look nowhere else.

set(_liburing_where)
if(TENSORFERRY_LIBURING_ONLY_ROOT)
  set(_liburing_where NO_DEFAULT_PATH PATHS "${Liburing_ROOT}" PATH_SUFFIXES include lib lib64)
endif()
find_path(Liburing_INCLUDE_DIR NAMES liburing.h ${_liburing_where})
find_library(Liburing_LIBRARY NAMES liburing.a liburing.so ${_liburing_where})
mark_as_advanced(Liburing_INCLUDE_DIR Liburing_LIBRARY)

if(NOT Liburing_INCLUDE_DIR OR NOT Liburing_LIBRARY)
  message(
    FATAL_ERROR
    "tensorferry is built with liburing, whose header or library was not found. Install it with\n"
    "  apt-get install liburing-dev    (Debian, Ubuntu)\n"
    "  dnf install liburing-devel      (Fedora, RHEL)"
  )
endif()

# The flag is new in 2.3, which has no version number in its headers yet.
file(
  STRINGS "${Liburing_INCLUDE_DIR}/liburing/io_uring.h" _liburing_flag
  REGEX IORING_SETUP_DEFER_TASKRUN
)
if(NOT _liburing_flag)
  message(
    FATAL_ERROR
    "tensorferry needs liburing 2.3 or later; that in ${Liburing_INCLUDE_DIR} is older. "
    "Build a later one from its sources and name the place it is installed in with\n"
    "  pip install --config-settings=cmake.define.Liburing_ROOT=PREFIX ..."
  )
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Liburing
  REQUIRED_VARS Liburing_LIBRARY Liburing_INCLUDE_DIR
)

if(NOT TARGET Liburing::liburing)
  add_library(Liburing::liburing UNKNOWN IMPORTED)
  set_target_properties(
    Liburing::liburing
    PROPERTIES
      IMPORTED_LOCATION "${Liburing_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${Liburing_INCLUDE_DIR}"
  )
endif()
