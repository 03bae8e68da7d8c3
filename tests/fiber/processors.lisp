;;;; how many processors there are: fiber/processors.lisp, runtime/fiber-quota.c

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/files.lisp" *load-truename*))

(def-suite* processors)

;;;; What the kernel says, below a directory of ours

(defun call-with-files (function files)
  "Call FUNCTION with a directory that has FILES, names and contents in turn, and nothing else."
  (let ((root (make-temporary-directory)))
    (unwind-protect
         (progn
           (loop for (name contents) on files by #'cddr
                 do (let ((path (concatenate 'string root name)))
                      (ensure-directories-exist path)
                      (with-open-file (out path :direction :output)
                        (write-line contents out))))
           (funcall function root))
      (sb-ext:delete-directory (concatenate 'string root "/") :recursive t))))

(defun quota (&rest files)
  (call-with-files #'sb-fiber::quota-of-processors files))

(defparameter *mount-2*
  "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate")
(defparameter *mounts-1*
  "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct")

(defun quota-2 (group &rest files)
  (apply #'quota "/proc/self/cgroup" (format nil "0::~A" group)
         "/proc/self/mountinfo" *mount-2* files))

(defun quota-1 (group &rest files)
  (apply #'quota
         "/proc/self/cgroup"
         (format nil "3:cpuset:/other~%2:cpu,cpuacct:~A~%1:name=systemd:/x~%0::/" group)
         "/proc/self/mountinfo" *mounts-1* files))

(test no-control-groups
  (is (null (quota)))
  (is (null (quota-2 "/" )))
  (is (null (quota-1 "/a"))))

(test quota-of-version-2
  (flet ((quota-of (max) (quota-2 "/a" "/sys/fs/cgroup/a/cpu.max" max)))
    (is (null (quota-of "max 100000")))
    (is (= 2 (quota-of "200000 100000")))
    (is (= 2 (quota-of "150000 100000")))
    (is (= 1 (quota-of "1000 100000")))
    (is (= 1 (quota-of "1000 1000000000")))
    (is (= 7 (quota-of "325000 50000")))
    (is (null (quota-of "")))
    (is (null (quota-of "100000 0")))))

;;; Prevents: more carriers than a group above allows.
(test quotas-of-ancestors
  (is (= 3 (quota-2 "/a/b/c"
                    "/sys/fs/cgroup/a/b/c/cpu.max" "max 100000"
                    "/sys/fs/cgroup/a/b/cpu.max" "500000 100000"
                    "/sys/fs/cgroup/a/cpu.max" "300000 100000")))
  (is (= 2 (quota-2 "/a/b"
                    "/sys/fs/cgroup/a/b/cpu.max" "200000 100000"
                    "/sys/fs/cgroup/a/cpu.max" "300000 100000")))
  (is (= 4 (quota-2 "/a" "/sys/fs/cgroup/cpu.max" "400000 100000"))))

(test quota-of-version-1
  (flet ((quota-of (quota &optional (period "100000"))
           (quota-1 "/a/b"
                    "/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us" quota
                    "/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us" period
                    "/sys/fs/cgroup/cpuset/other/cpu.cfs_quota_us" "100000"
                    "/sys/fs/cgroup/cpuset/other/cpu.cfs_period_us" "100000")))
    (is (null (quota-of "-1")))
    (is (= 2 (quota-of "200000")))
    (is (= 4 (quota-of "175000" "50000")))))

;;; A container sees its own group as the root of what is mounted; the path may be from the host.
(test what-is-mounted-is-a-group-itself
  (flet ((quota-of (group root)
           (quota "/proc/self/cgroup" (format nil "0::~A" group)
                  "/proc/self/mountinfo"
                  (format nil "30 23 0:26 ~A /cg ro - cgroup2 cgroup2 rw" root)
                  "/cg/cpu.max" "300000 100000"
                  "/cg/inner/cpu.max" "200000 100000"
                  "/cg/docker/cpu.max" "100000 100000")))
    (is (= 3 (quota-of "/docker/1" "/docker/1")))
    (is (= 2 (quota-of "/docker/1/inner" "/docker/1")))
    (is (= 3 (quota-of "/docker/12" "/docker/1")))
    (is (= 3 (quota-of "/../elsewhere" "/docker/1")))
    (is (= 1 (quota-of "/docker" "/")))))

(test mounted-in-two-places
  (is (= 2 (quota "/proc/self/cgroup" "0::/a/b"
                  "/proc/self/mountinfo"
                  "30 23 0:26 /other /cg1 ro - cgroup2 cgroup2 rw
31 23 0:26 /a /cg2 ro - cgroup2 cgroup2 rw"
                  "/cg1/cpu.max" "100000 100000"
                  "/cg2/b/cpu.max" "200000 100000"))))

(test contents-that-are-not-expected
  (is (null (quota "/proc/self/cgroup" "0" "/proc/self/mountinfo" *mount-2*)))
  (is (null (quota "/proc/self/cgroup" "0::/" "/proc/self/mountinfo" "30 23 - x"
                   "/sys/fs/cgroup/cpu.max" "100000 100000")))
  (let ((long (make-string 10000 :initial-element #\a)))
    (is (null (quota-2 (format nil "/~A" long))))))

;;;; What is told

(test processors-of-this-process
  (multiple-value-bind (count limit) (processor-count)
    (is (<= 1 count (sb-fiber::%processor-count)))
    (is (eq limit (if (< count (sb-fiber::%processor-count)) :quota :affinity)))))
