// Look up the best known configurations that `tunebench export --table FILE` wrote. C++17, no dependency.
//
//     const auto table = tunebench::LookupTable::read("kernels.table");
//     const auto answer = table.find("gemm:m=64,n=4096,k=4096,dtype=f16", "sm_90", 132);
//     if (answer) launch(answer->config.integer("bm"), answer->config.integer("bn"));
//
// An answer is of one of three kinds:
//   exact     the workload is in the table, for this device or another one of its architecture;
//   nearest   it is not: the configuration of the nearest workload that differs in sizes, layouts and fused
//             operations alone. Constraints of the kernel on sizes are not checked;
//   fallback  none is comparable: the default configuration for the one with the fewest other values.
// There is no answer for an operator or an architecture that is not in the table.
//
// A file that cannot be read or is damaged throws `TableError`, and a malformed workload `WorkloadError`.
// A table never changes after it was read, so that threads may share it.

#ifndef TUNEBENCH_LOOKUP_TABLE_HPP
#define TUNEBENCH_LOOKUP_TABLE_HPP

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace tunebench {

struct TableError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct WorkloadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The value of each parameter of a kernel, by name.
class Config {
 public:
  using Value = std::variant<bool, std::int64_t, double, std::string>;

  const std::map<std::string, Value>& values() const { return values_; }
  bool boolean(const std::string& name) const { return typed<bool>(name, "a bool"); }
  std::int64_t integer(const std::string& name) const { return typed<std::int64_t>(name, "an integer"); }
  double number(const std::string& name) const { return typed<double>(name, "a floating-point number"); }
  const std::string& text(const std::string& name) const { return typed<std::string>(name, "text"); }

 private:
  friend class LookupTable;

  template <typename T>
  const T& typed(const std::string& name, const char* kind) const {
    const auto entry = values_.find(name);
    if (entry == values_.end()) throw std::out_of_range("the configuration has no parameter " + name);
    const T* value = std::get_if<T>(&entry->second);
    if (value == nullptr) throw std::invalid_argument("parameter " + name + " is not " + kind);
    return *value;
  }

  std::map<std::string, Value> values_;
};

enum class Match { exact, nearest, fallback };

struct Answer {
  Match match;
  std::string workload;     // in the table; of an exact answer, the requested one
  std::string device;       // for which the configuration was looked up when the table was written
  std::string variant;      // kernel, such as gemm/cuda_wgmma
  std::string how;          // source of the time: measured here, same architecture, neighbour, predicted, ...
  std::string revision;     // of the kernel's source
  double expected_us = 0;   // time of the workload in the table; of a fallback, of its best configuration
  double distance = 0;      // of the workloads, in doublings of sizes
  Config config;
};

class LookupTable {
 public:
  // Read a file. Throws TableError.
  static LookupTable read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw TableError(path + ": cannot be opened");
    std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (file.bad()) throw TableError(path + ": cannot be read");
    return parse(bytes, path);
  }

  // Read the contents of a file. Throws TableError, whose message starts with `name`.
  static LookupTable parse(const std::string& bytes, const std::string& name = "table") {
    LookupTable table;
    Reader reader(bytes, name);
    table.fill(reader);
    return table;
  }

  // Return the best answer, or nothing if the table has none. Throws WorkloadError for a malformed workload.
  //
  // device: a stored key such as "sm_90:h100-sxm,sm=132", or an architecture such as "sm_90".
  // sm_count: multiprocessors, to choose among devices of an architecture; 0 if unknown.
  std::optional<Answer> find(const std::string& workload, const std::string& device,
                             std::int64_t sm_count = 0) const {
    const std::string name = trimmed(workload.substr(0, workload.find(':')));
    const auto entry = by_name_.find(name);
    if (workload.find(':') == std::string::npos) {
      throw WorkloadError("workload " + quoted(workload) + " is not operator:dimension=value,...");
    }
    if (entry == by_name_.end()) return std::nullopt;
    const Operator& op = operators_[entry->second];
    const std::vector<std::string> values = op.values(workload.substr(workload.find(':') + 1));
    const std::vector<std::size_t> order = devices_for(device, sm_count);
    for (const std::size_t index : order) {
      const auto row = exact_.find(key(index, entry->second, values));
      if (row != exact_.end()) return answer(rows_[row->second], Match::exact, 0.0);
    }
    return nearest(op, entry->second, values, order);
  }

  std::size_t size() const { return rows_.size(); }

 private:
  struct Dimension {
    std::string name;
    char kind;  // i: integer, f: float, b: bool, n: a name; B, c: bool, name that a neighbour may change
    std::optional<std::string> preset;   // its default
    std::optional<std::size_t> follows;  // or an earlier dimension, whose value has this default:
    std::map<std::string, std::string> presets;
    bool is_rsqrt = false;  // the default is 1 / sqrt of its value
  };

  struct Operator {
    std::string name;
    std::vector<Dimension> dimensions;
    std::map<std::string, std::size_t> by_name;  // with aliases

    // Return the value of each dimension of a text such as "m=64,n=64,dtype=f16", in any order.
    std::vector<std::string> values(const std::string& text) const {
      std::vector<std::optional<std::string>> given(dimensions.size());
      for (const std::string& item : items_of(text)) {
        const std::size_t equals = item.find('=');
        const std::string dimension = trimmed(item.substr(0, equals));
        const std::string value = equals == std::string::npos ? "" : trimmed(item.substr(equals + 1));
        const auto entry = by_name.find(dimension);
        if (value.empty()) throw WorkloadError(name + ": expected dimension=value, got " + quoted(item));
        if (entry == by_name.end()) throw WorkloadError(name + ": unknown dimension " + quoted(dimension));
        if (given[entry->second]) throw WorkloadError(name + ": " + quoted(dimension) + " is given twice");
        given[entry->second] = canonical(dimensions[entry->second], value);
      }
      std::vector<std::string> all;
      for (std::size_t i = 0; i < dimensions.size(); i++) {
        const Dimension& dimension = dimensions[i];
        if (given[i]) all.push_back(*given[i]);
        else if (dimension.follows) all.push_back(followed(dimension, all[*dimension.follows]));
        else if (dimension.preset) all.push_back(*dimension.preset);
        else throw WorkloadError(name + ": missing " + dimension.name);
      }
      return all;
    }

    static std::string followed(const Dimension& dimension, const std::string& value) {
      if (dimension.is_rsqrt) {
        double number = 0;
        to_number(value, number);
        return written(1.0 / std::sqrt(number));
      }
      const auto preset = dimension.presets.find(value);
      return preset == dimension.presets.end() ? value : preset->second;
    }

    std::string canonical(const Dimension& dimension, const std::string& value) const {
      if (dimension.kind == 'b' || dimension.kind == 'B') {
        if (value == "true" || value == "True" || value == "1") return "true";
        if (value == "false" || value == "False" || value == "0") return "false";
        throw WorkloadError(name + ": " + dimension.name + "=" + quoted(value) + " must be true or false");
      }
      if (dimension.kind == 'f') {
        std::string number;
        if (!canonical_number(value, number)) {
          throw WorkloadError(name + ": " + dimension.name + "=" + quoted(value) + " must be a number");
        }
        return number;
      }
      if (dimension.kind != 'i') return value;
      std::int64_t number = 0;
      if (!to_integer(value, number) || number > std::numeric_limits<std::int32_t>::max() ||
          number < std::numeric_limits<std::int32_t>::min()) {
        throw WorkloadError(name + ": " + dimension.name + "=" + quoted(value) +
                            " must be a 32-bit whole number");
      }
      return std::to_string(number);
    }
  };

  struct Device {
    std::string key, architecture, product;
    std::int64_t sm_count;
  };

  struct Row {
    std::size_t device, op;
    std::vector<std::string> values;
    std::string workload, variant, how, revision;
    double expected_us;
    Config config, fallback;
  };

  // Lines of fields that are separated by tabs.
  struct Reader {
    Reader(const std::string& contents, const std::string& name) : bytes(contents), file(name) {}

    const std::string& bytes;
    const std::string& file;
    std::size_t at = 0;
    std::size_t line = 0;
    std::vector<std::string> fields;
    std::size_t field = 0;

    [[noreturn]] void fail(const std::string& why) const {
      throw TableError(file + ", line " + std::to_string(line) + ": " + why);
    }

    void next_line() {
      line++;
      const std::size_t end = bytes.find('\n', at);
      if (end == std::string::npos) fail("the file is truncated");
      fields.assign(1, "");
      field = 0;
      for (std::size_t i = at; i < end; i++) {
        char character = bytes[i];
        if (character == '\t') {
          fields.emplace_back();
          continue;
        }
        if (character == '\\') {
          if (++i == end) fail("a backslash ends the line");
          character = bytes[i] == 't' ? '\t' : bytes[i] == 'n' ? '\n' : bytes[i];
        }
        fields.back() += character;
      }
      at = end + 1;
    }

    const std::string& text() {
      if (field == fields.size()) fail("a field is missing");
      return fields[field++];
    }

    std::int64_t integer() {
      std::int64_t value = 0;
      const std::string& digits = text();
      if (!to_integer(digits, value)) fail("expected a whole number, got " + quoted(digits));
      return value;
    }

    // Return a number of items that follow, or an index, which is below `end`.
    std::size_t below(std::size_t end, const char* what) {
      const std::int64_t value = integer();
      if (value < 0 || static_cast<std::uint64_t>(value) >= end) {
        fail(std::string(what) + " is " + std::to_string(value) + ", expected 0 to below " +
             std::to_string(end));
      }
      return static_cast<std::size_t>(value);
    }

    std::size_t count() { return below(fields.size(), "a count"); }

    double number() {
      const std::string& digits = text();
      double value = 0;
      if (!to_number(digits, value)) fail("expected a number, got " + quoted(digits));
      return value;
    }

    // Return the value of a dimension, in canonical form.
    std::string value(char kind) {
      std::string stated = text();
      std::int64_t whole = 0;
      if (kind == 'i' && (!to_integer(stated, whole) || whole < -(1LL << 31) || whole >= (1LL << 31))) {
        fail("expected a 32-bit whole number, got " + quoted(stated));
      }
      if (kind == 'f' && !canonical_number(stated, stated)) fail("expected a number, got " + quoted(stated));
      return stated;
    }

    void end_line() const {
      if (field != fields.size()) fail("there are too many fields");
    }
  };

  void fill(Reader& reader) {
    reader.next_line();
    if (reader.text() != "tunebench-lookup-table") reader.fail("this is no lookup table of tunebench");
    if (reader.integer() != 1) reader.fail("expected format 1; use the header of the same version");
    while (true) {
      const std::size_t start = reader.at;
      reader.next_line();
      const std::string kind = reader.text();
      if (kind == "end") {
        check_end(reader, start);
        return;
      }
      if (kind == "device") add_device(reader);
      else if (kind == "operator") add_operator(reader);
      else if (kind == "answer") add_row(reader);
      else reader.fail("unknown kind of line " + quoted(kind));
      reader.end_line();
    }
  }

  static void check_end(Reader& reader, std::size_t start) {
    std::uint64_t hash = 14695981039346656037ULL;  // FNV-1a
    for (std::size_t i = 0; i < start; i++) {
      hash = (hash ^ static_cast<unsigned char>(reader.bytes[i])) * 1099511628211ULL;
    }
    if (reader.text() != std::to_string(hash)) reader.fail("the file is damaged: its checksum differs");
    reader.end_line();
    if (reader.at != reader.bytes.size()) reader.fail("there is something after the last line");
  }

  void add_device(Reader& reader) {
    Device device;
    device.key = reader.text();
    device.architecture = reader.text();
    device.product = reader.text();
    device.sm_count = static_cast<std::int64_t>(reader.below(1U << 20, "the number of SMs"));
    devices_.push_back(device);
  }

  void add_operator(Reader& reader) {
    Operator op;
    op.name = reader.text();
    const std::size_t count = reader.count();
    for (std::size_t i = 0; i < count; i++) {
      Dimension dimension;
      dimension.name = reader.text();
      const std::string kind = reader.text();
      if (kind.size() != 1 || std::string("ifbBcn").find(kind) == std::string::npos) {
        reader.fail("unknown kind of dimension " + quoted(kind));
      }
      dimension.kind = kind[0];
      const std::string preset = reader.text();
      if (preset == "value") dimension.preset = reader.value(dimension.kind);
      else if (preset == "follows") add_followed(reader, i, dimension);
      else if (preset == "rsqrt") {
        dimension.follows = reader.below(i, "a followed dimension");
        dimension.is_rsqrt = true;
      } else if (preset != "none") reader.fail("unknown kind of default " + quoted(preset));
      if (!op.by_name.emplace(dimension.name, i).second) reader.fail("a dimension is listed twice");
      op.dimensions.push_back(dimension);
    }
    for (std::size_t aliases = reader.count(); aliases > 0; aliases--) {
      const std::string alias = reader.text();
      op.by_name.emplace(alias, reader.below(count, "the dimension of an alias"));
    }
    if (!by_name_.emplace(op.name, operators_.size()).second) reader.fail("an operator is listed twice");
    operators_.push_back(op);
  }

  static void add_followed(Reader& reader, std::size_t index, Dimension& dimension) {
    dimension.follows = reader.below(index, "a followed dimension");
    for (std::size_t values = reader.count(); values > 0; values--) {
      const std::string value = reader.text();
      dimension.presets[value] = reader.text();
    }
  }

  void add_row(Reader& reader) {
    Row row;
    row.device = reader.below(devices_.size(), "the device");
    row.op = reader.below(operators_.size(), "the operator");
    row.workload = reader.text();
    for (const Dimension& dimension : operators_[row.op].dimensions) {
      row.values.push_back(reader.value(dimension.kind));
    }
    row.variant = reader.text();
    row.how = reader.text();
    row.revision = reader.text();
    row.expected_us = reader.number();
    for (std::size_t count = reader.count(); count > 0; count--) {
      const std::string name = reader.text();
      row.config.values_[name] = value_of(reader);
      row.fallback.values_[name] = value_of(reader);
    }
    exact_.emplace(key(row.device, row.op, row.values), rows_.size());
    rows_.push_back(row);
  }

  static Config::Value value_of(Reader& reader) {
    const std::string kind = reader.text();
    if (kind == "integer") return reader.integer();
    if (kind == "number") return reader.number();
    if (kind == "text") return reader.text();
    if (kind != "bool") reader.fail("unknown type of a parameter " + quoted(kind));
    return reader.below(2, "a bool") == 1;
  }

  // Return the devices that may have an answer, best first: the same one, the same product with another
  // power limit, the nearest number of multiprocessors.
  std::vector<std::size_t> devices_for(const std::string& device, std::int64_t sm_count) const {
    const std::size_t colon = device.find(':');
    const std::string architecture = device.substr(0, colon);
    std::string product = colon == std::string::npos ? "" : device.substr(colon + 1);
    const std::size_t count_at = product.find(",sm=");
    std::int64_t stated = 0;
    if (count_at != std::string::npos) {
      const std::string digits = product.substr(count_at + 4, product.find(',', count_at + 1) - count_at - 4);
      if (to_integer(digits, stated) && sm_count == 0) sm_count = stated;
    }
    product = product.substr(0, product.find(','));
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < devices_.size(); i++) {
      if (devices_[i].architecture == architecture) order.push_back(i);
    }
    const auto rank = [&](std::size_t i) {
      const Device& other = devices_[i];
      const std::int64_t apart = sm_count > 0 ? other.sm_count - sm_count : 0;
      return std::make_tuple(other.key != device, other.product != product, apart < 0 ? -apart : apart,
                             other.key);
    };
    std::sort(order.begin(), order.end(),
              [&](std::size_t left, std::size_t right) { return rank(left) < rank(right); });
    return order;
  }

  std::optional<Answer> nearest(const Operator& op, std::size_t op_index,
                                const std::vector<std::string>& values,
                                const std::vector<std::size_t>& order) const {
    using Rank = std::tuple<std::size_t, double, std::size_t>;  // other values, distance, position of device
    std::vector<std::size_t> position(devices_.size(), devices_.size());
    for (std::size_t i = 0; i < order.size(); i++) position[order[i]] = i;
    const Row* best = nullptr;
    Rank least;
    for (const Row& row : rows_) {
      if (row.op != op_index || position[row.device] == devices_.size()) continue;
      const auto [others, distance] = compared(op, values, row.values);
      const Rank rank(others, distance, position[row.device]);
      if (best == nullptr || rank < least) {
        best = &row;
        least = rank;
      }
    }
    if (best == nullptr) return std::nullopt;
    const Match match = std::get<0>(least) == 0 ? Match::nearest : Match::fallback;
    return answer(*best, match, std::get<1>(least));
  }

  // Return how many values differ that a kernel for the other workload cannot have, and the distance in
  // doublings of sizes. A layout or a fused operation that differs counts as one doubling.
  static std::pair<std::size_t, double> compared(const Operator& op, const std::vector<std::string>& mine,
                                                 const std::vector<std::string>& its) {
    std::size_t others = 0;
    double squares = 0;
    for (std::size_t i = 0; i < mine.size(); i++) {
      const char kind = op.dimensions[i].kind;
      if (mine[i] == its[i] || kind == 'f') continue;
      if (kind == 'i') {
        std::int64_t here = 0, there = 0;
        to_integer(mine[i], here);
        to_integer(its[i], there);
        if (here < 0 || there < 0) {
          others++;
          continue;
        }
        const double doublings = std::log2(static_cast<double>(here + 1) / static_cast<double>(there + 1));
        squares += doublings * doublings;
      } else if (kind == 'c' || kind == 'B') {
        squares += 1.0;
      } else {
        others++;
      }
    }
    return {others, std::sqrt(squares)};
  }

  Answer answer(const Row& row, Match match, double distance) const {
    Answer result;
    result.match = match;
    result.workload = row.workload;
    result.device = devices_[row.device].key;
    result.variant = row.variant;
    result.how = row.how;
    result.revision = row.revision;
    result.expected_us = row.expected_us;
    result.distance = distance;
    result.config = match == Match::fallback ? row.fallback : row.config;
    return result;
  }

  static std::string key(std::size_t device, std::size_t op, const std::vector<std::string>& values) {
    std::string text = std::to_string(device) + "\t" + std::to_string(op);
    for (const std::string& value : values) text += "\t" + value;
    return text;
  }

  // Split at the commas outside parentheses; empty items are left out.
  static std::vector<std::string> items_of(const std::string& text) {
    std::vector<std::string> items(1);
    int depth = 0;
    for (const char character : text) {
      depth = std::max(0, depth + (character == '(') - (character == ')'));
      if (character == ',' && depth == 0) items.emplace_back();
      else items.back() += character;
    }
    items.erase(std::remove(items.begin(), items.end(), ""), items.end());
    return items;
  }

  // Return the start of a text in quotes, for messages.
  static std::string quoted(const std::string& text) {
    std::string shown = text.substr(0, 80);
    for (char& character : shown) {
      if (character < ' ' || character > '~') character = '?';  // also bytes above 127
    }
    return "'" + shown + (text.size() > 80 ? "...'" : "'");
  }

  static std::string trimmed(const std::string& text) {
    const char* spaces = " \t\r\n";
    const std::size_t first = text.find_first_not_of(spaces);
    return first == std::string::npos ? ""
                                      : text.substr(first, text.find_last_not_of(spaces) - first + 1);
  }

  static bool to_integer(const std::string& text, std::int64_t& value) {
    const std::size_t sign = text.compare(0, 1, "-") == 0 ? 1 : 0;
    if (text.size() == sign) return false;
    if (text.find_first_not_of("0123456789", sign) != std::string::npos) return false;
    errno = 0;
    value = std::strtoll(text.c_str(), nullptr, 10);
    return errno == 0;
  }

  static bool to_number(const std::string& text, double& value) {
    char* end = nullptr;
    value = std::strtod(text.c_str(), &end);
    return !text.empty() && end == text.c_str() + text.size() && std::isfinite(value);
  }

  // Write a number so that equal ones have equal text.
  static bool canonical_number(const std::string& text, std::string& canonical) {
    double value = 0;
    if (!to_number(text, value)) return false;
    canonical = written(value);
    return true;
  }

  static std::string written(double value) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.17g", value);
    return digits;
  }

  std::vector<Device> devices_;
  std::vector<Operator> operators_;
  std::vector<Row> rows_;
  std::map<std::string, std::size_t> by_name_;
  std::unordered_map<std::string, std::size_t> exact_;
};

}  // namespace tunebench

#endif  // TUNEBENCH_LOOKUP_TABLE_HPP
