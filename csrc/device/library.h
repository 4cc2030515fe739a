// A shared library that is opened at run time, and may not be there.
#pragma once

#include <string>
#include <vector>

namespace tensorferry {

class Library {
 public:
  // Opens the first of `candidates` (names that the linker knows, or paths) that can be opened. Where the environment
  // variable `override_name` is set, it names the only candidate. Never closed: GPU libraries do not survive that.
  // Without success, reason() says what was tried.
  Library(const char* override_name, const std::vector<std::string>& candidates);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& reason() const { return reason_; }
  const std::string& path() const { return path_; }

  // Fills a typed pointer to a function; false, and a reason, if the library has none of that name.
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
