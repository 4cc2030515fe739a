// A shared library that is opened at run time and may be missing.
#pragma once

#include <string>
#include <vector>

namespace tensorferry {

class Library {
 public:
  // Open the first of `candidates` (names for the dynamic linker, or paths) that can be opened. If the environment
  // variable `override_name` is set, its value is the only candidate. The library is never closed, because GPU
  // libraries do not survive dlclose(). If no candidate can be opened, reason() is the dynamic linker's message for the
  // first one.
  Library(const char* override_name, const std::vector<std::string>& candidates);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& reason() const { return reason_; }
  const std::string& path() const { return path_; }  // the candidate that was opened

  // Set a typed pointer to the function `name`. Returns false, and sets the reason, if the library has no such
  // function.
  template <typename Function>
  bool load(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(symbol(name));
    return function != nullptr;
  }

 private:
  void* symbol(const char* name);

  void* handle_ = nullptr;
  std::string path_;
  std::string reason_;
};

}  // namespace tensorferry
